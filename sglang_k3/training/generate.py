"""Greedy text from the reference model: slow, exact, and without a server."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

from sglang_k3.models.reference import ReferenceModel
from sglang_k3.training.dataset import SEPARATOR


def greedy_text(model: ReferenceModel, tokenizer: Tokenizer, prompt: str, new_tokens: int) -> str:
    """What follows the prompt, at most `new_tokens` tokens, up to the end of the document."""
    state = model.new_state()
    logits = model.forward(tokenizer.encode(prompt).ids, state)[-1]
    written: list[int] = []
    while len(written) < new_tokens:
        token = int(torch.argmax(logits))
        if token == SEPARATOR:
            break
        written.append(token)
        logits = model.step(token, state)
    return tokenizer.decode(written, skip_special_tokens=False)
