"""What changes in the course of training, as functions of the progress from 0 to 1."""

from __future__ import annotations

import random
from dataclasses import dataclass

TOKENS = 2_232_320
"""Tokens of the full run."""

WARM_UP_STEPS = 20
_DECAY_FROM = 0.6
_LAST_FACTOR = 0.04
_ROUND_FROM = 0.75
_BALANCE_RATE = 0.01

# From which progress on, tokens of a step, and the row lengths to draw from.
_PHASES: tuple[tuple[float, int, tuple[int, ...]], ...] = (
    (0.0, 2048, (256, 256, 512)),
    (0.25, 2048, (256, 512, 512)),
    (0.55, 4096, (256, 512, 1024)),
    (0.8, 4096, (512, 1024, 2048)),
)


@dataclass(frozen=True)
class StepPlan:
    """One step: rate_factor on both learning rates, rounded: experts seen as MXFP4 (quantisation in the
    loop), balance_rate of the router biases."""

    rows: int
    length: int
    rate_factor: float
    rounded: bool
    balance_rate: float


def plan(step: int, progress: float, seed: int) -> StepPlan:
    """The step's plan; the length is drawn from the seed and the step alone."""
    tokens, lengths = next((t, ls) for start, t, ls in reversed(_PHASES) if progress >= start)
    length = random.Random(f"{seed} {step}").choice(lengths)
    factor = min(1.0, (step + 1) / WARM_UP_STEPS)
    if progress > _DECAY_FROM:
        left = max(0.0, 1.0 - progress) / (1.0 - _DECAY_FROM)
        factor *= _LAST_FACTOR + (1.0 - _LAST_FACTOR) * left
    return StepPlan(
        rows=tokens // length,
        length=length,
        rate_factor=factor,
        rounded=progress >= _ROUND_FROM,
        balance_rate=_BALANCE_RATE * factor,
    )
