"""Makes the server say a text of the test's choice, so that its parsers meet what a test wants them to."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from tokenizers import Tokenizer

_SPECIAL = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")


class Script(CustomLogitProcessor):
    """Leaves one token possible at each step: the next of custom_params["script"]."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            # The request's own output is a step behind under overlap scheduling: count here.
            step = params.get("step", 0)
            params["step"] = step + 1
            logits[row] = -torch.inf
            logits[row, params["script"][min(step, len(params["script"]) - 1)]] = 0.0
        return logits


def byte_by_byte(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of the text in the smallest pieces there are: one byte, or one special token."""
    ids: list[int] = []
    while text:
        special = next((mark for mark in _SPECIAL if text.startswith(mark)), None)
        piece = special or text[0]
        found = tokenizer.token_to_id(piece) if special else None
        ids += tokenizer.encode(piece).ids if found is None else [found]
        text = text.removeprefix(piece)
    return ids
