"""What a draft learns from: samples, what the target saw in them, and batches of blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_k3.training.model import TrainingModel
from sglang_k3.training.regenerate import Sample, tapped

_WRITTEN_SHARE = 0.8
"""Of the anchors, those in the continuation; the others are in the prompt."""

_TOKENS = 4096
"""Tokens that the target reads at a time."""


@dataclass(frozen=True)
class Seen:
    """A sample and what the target made of it: hidden [T, taps * D] and last [T, D], fp16."""

    sample: Sample
    hidden: Tensor
    last: Tensor


def look(
    target: TrainingModel, samples: Sequence[Sample], layers: Sequence[int], mixture: bool, on_progress
) -> list[Seen]:
    """Every sample through the target, longest first so that a batch has little padding."""
    order = sorted(range(len(samples)), key=lambda i: -len(samples[i].tokens))
    seen: dict[int, Seen] = {}
    while order:
        length = len(samples[order[0]].tokens)
        part, order = order[: max(1, _TOKENS // length)], order[max(1, _TOKENS // length) :]
        tokens = torch.zeros(len(part), length, dtype=torch.int64)
        for row, i in enumerate(part):
            tokens[row, : len(samples[i].tokens)] = torch.tensor(samples[i].tokens)
        hidden, last = tapped(target, tokens, layers, mixture)
        for row, i in enumerate(part):
            size = len(samples[i].tokens)
            seen[i] = Seen(samples[i], hidden[row, :size].half(), last[row, :size].half())
        on_progress(len(seen), len(samples))
    return [seen[i] for i in range(len(samples))]


@dataclass(frozen=True)
class Batch:
    """Blocks of some samples. tokens [B, T], hidden [B, T, taps * D], anchors [B, A]; previous, wanted
    [B, A, G]: the token in front of each row's and the token it is about; teacher [B, A, G, D]: what the
    target's head reads there; valid [B, A, G]: within the sample."""

    tokens: Tensor
    hidden: Tensor
    anchors: Tensor
    previous: Tensor
    wanted: Tensor
    teacher: Tensor
    valid: Tensor


def batch_of(parts: Sequence[Seen], anchors: Sequence[Sequence[int]], gamma: int) -> Batch:
    """anchors: as many positions in each sample."""
    length = max(len(part.sample.tokens) for part in parts)
    tokens = torch.stack(
        [F.pad(torch.tensor(part.sample.tokens), (0, length - len(part.sample.tokens))) for part in parts]
    )
    hidden, last = (
        torch.stack([F.pad(x.float(), (0, 0, 0, length - len(x))) for x in rows])
        for rows in ([part.hidden for part in parts], [part.last for part in parts])
    )
    at = torch.tensor(anchors)
    rows = at.unsqueeze(2) + torch.arange(gamma)
    sizes = torch.tensor([len(part.sample.tokens) for part in parts]).view(-1, 1, 1)
    valid = rows + 1 < sizes
    rows = rows.clamp(max=length - 2)
    which = torch.arange(len(parts)).view(-1, 1, 1)
    return Batch(tokens, hidden, at, tokens[which, rows], tokens[which, rows + 1], last[which, rows], valid)


def draw(seen: Sequence[Seen], samples: int, blocks: int, gamma: int, rng: random.Random) -> Batch:
    """A batch of random samples of like length with random anchors, most of them in what the target wrote."""
    first = rng.randrange(len(seen))
    near = sorted(rng.sample(range(len(seen)), min(len(seen), 8 * samples)))
    length = len(seen[first].sample.tokens)
    near.sort(key=lambda i: abs(len(seen[i].sample.tokens) - length))
    parts = [seen[i] for i in near[:samples]]
    anchors = []
    for part in parts:
        end, written = len(part.sample.tokens) - 1, part.sample.written
        anchors.append(
            [
                rng.randrange(min(written - 1, end - 1), end)
                if rng.random() < _WRITTEN_SHARE
                else rng.randrange(end)
                for _ in range(blocks)
            ]
        )
    return batch_of(parts, anchors, gamma)
