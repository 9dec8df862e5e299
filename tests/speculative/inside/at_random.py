"""A budget that decides by dice: every mixture of row counts, and of who drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from sglang_k3.speculative.verify_budget import Decision, VerifyBudget


class AtRandom(VerifyBudget):
    def __init__(self, seed: int) -> None:
        super().__init__(8, None)
        self._draw = random.Random(seed)
        self.widths: set[int] = set()
        """How many different row counts the requests of a step had."""

    def who_drafts(self, ids: Sequence[str]) -> list[bool]:
        share = self._draw.choice((0.0, 0.5, 1.0))
        return [self._draw.random() < share for _ in ids]

    def decide(
        self, ids: Sequence[str], drafted: Sequence[bool], chances: np.ndarray, context: int
    ) -> Decision:
        rows = [self._draw.randint(1, 8) if drafts else 1 for drafts in drafted]
        self.widths.add(len(set(rows)))
        return Decision(rows, [0.0] * len(rows))
