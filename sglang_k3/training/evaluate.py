"""Held-out figures: bits per byte, and the loss by position in the window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from sglang_k3.training.dataset import SEPARATOR
from sglang_k3.training.model import TrainingModel

WINDOW = 2048
_ROWS = 1024
"""Rows of logits that exist at a time."""


@dataclass(frozen=True)
class HeldOut:
    """Token rows [n, WINDOW + 1] (a file is cut into windows, each a row) and what they stand for."""

    windows: list[Tensor]
    bytes: int


@dataclass(frozen=True)
class Evaluation:
    """nats: mean loss of a token. by_position: mean loss of tokens between two positions."""

    bits_per_byte: float
    nats: float
    by_position: dict[tuple[int, int], float]


def held_out_windows(texts: Mapping[str, str], tokenizer: Tokenizer, limit: int | None = None) -> HeldOut:
    """Cut every file into windows that overlap by one token, so that each token is predicted once.

    limit: use the first so many files in order of their names.
    """
    windows, size = [], 0
    for name in sorted(texts)[:limit]:
        size += len(texts[name].encode())
        tokens = torch.tensor([SEPARATOR, *tokenizer.encode(texts[name]).ids])
        windows += [tokens[i : i + WINDOW + 1] for i in range(0, len(tokens) - 1, WINDOW)]
    return HeldOut(windows, size)


@torch.no_grad()
def evaluate(model: TrainingModel, held_out: HeldOut) -> Evaluation:
    """Every window starts from an empty state."""
    edges = [0, *(2**i for i in range(5, int(math.log2(WINDOW)) + 1))]
    sums, counts = torch.zeros(len(edges) - 1), torch.zeros(len(edges) - 1)
    total, tokens = 0.0, 0
    for window in held_out.windows:
        losses = token_losses(model, window)
        total += losses.double().sum().item()
        tokens += len(losses)
        for i, (low, high) in enumerate(pairwise(edges)):
            part = losses[low:high]
            sums[i] += part.sum()
            counts[i] += len(part)
    for router in model.routers:
        router.load.zero_()  # evaluation must not move the balance of the next training step
    by_position = {
        (low, high): (sums[i] / counts[i]).item()
        for i, (low, high) in enumerate(pairwise(edges))
        if counts[i] > 0
    }
    return Evaluation(total / math.log(2) / held_out.bytes, total / tokens, by_position)


def token_losses(model: TrainingModel, window: Tensor) -> Tensor:
    """window [T + 1] -> loss of each predicted token [T], in nats."""
    hidden = model(window[None, :-1])[0]
    targets = window[1:]
    return torch.cat(
        [
            F.cross_entropy(model.lm_head(rows), wanted, reduction="none")
            for rows, wanted in zip(hidden.split(_ROWS), targets.split(_ROWS), strict=True)
        ]
    )
