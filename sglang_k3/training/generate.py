"""Text from the reference model: slow, exact, and without a server."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

from sglang_k3.models.reference import ReferenceModel
from sglang_k3.training.dataset import SEPARATOR
from sglang_k3.training.tiny import SAMPLING


def sampled_text(
    model: ReferenceModel, tokenizer: Tokenizer, prompt: str, new_tokens: int, generator: torch.Generator
) -> str:
    """What follows the prompt under `SAMPLING`, at most `new_tokens` tokens, up to the document's end."""
    state = model.new_state()
    logits = model.forward(tokenizer.encode(prompt).ids, state)[-1]
    written: list[int] = []
    while len(written) < new_tokens:
        token = sample(logits, SAMPLING["temperature"], SAMPLING["top_p"], generator)
        if token == SEPARATOR:
            break
        written.append(token)
        logits = model.step(token, state)
    return tokenizer.decode(written, skip_special_tokens=False)


def sample(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """A token from logits [vocabulary]: the likeliest ones that together reach top_p take part."""
    chances, tokens = torch.softmax(logits / temperature, -1).sort(descending=True, stable=True)
    chances[chances.cumsum(0) - chances > top_p] = 0.0
    return int(tokens[torch.multinomial(chances, 1, generator=generator)])
