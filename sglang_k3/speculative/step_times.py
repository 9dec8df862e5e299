"""How long a step takes, by what it computes: regressed on the steps that were served."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FORGETTING, _FADING, _GONE = 0.9, 0.998, 1e-3
"""How much a step leaves of the weight of older ones of its kind, and of all; a kind with less weight than
the last is dropped, so that their number does not grow with a server's age."""

_OUTLIER = 2.0
"""A step that takes so many times what is expected counts as that: a first call with new shapes prepares its
kernels, and says nothing about the next one."""

_SWEEPS = 40
"""Of a solution that begins where the last one ended."""


class StepTimes:
    """Seconds of a step by features of its work, of which the first is 1: least squares with coefficients
    that are not negative.

    A step makes older ones of its kind (work about as large) count less; the other kinds fade slowly. So a
    load that swings finds again what it left, and what varies within the present load does not stand for the
    rest.
    """

    def __init__(self, features: int) -> None:
        self._features = features
        self._kinds: dict[tuple[int, ...], np.ndarray] = {}
        """[features, features + 1] of each kind: the sums of x x^T, and of seconds x."""

        self._steps = 0
        self.coefficients = np.zeros(features)

    def observe(self, features: Sequence[float] | np.ndarray, seconds: float) -> None:
        x = np.asarray(features, dtype=float)
        if self._steps >= len(x):
            seconds = min(seconds, _OUTLIER * float(self(x)))
        kind = tuple(np.rint(2 * np.log2(1 + x)).astype(int).tolist())
        sums = self._kinds.get(kind)
        if sums is None:
            sums = self._kinds[kind] = np.zeros((self._features, self._features + 1))
        sums *= _FORGETTING
        sums += np.outer(x, [*x, seconds])
        self._steps += 1
        if self._steps < 16 or self._steps % 8 == 0:
            self._solve()

    def _solve(self) -> None:
        together = np.zeros((self._features, self._features + 1))
        fading = _FADING ** (1 if self._steps < 16 else 8)
        for sums in self._kinds.values():
            sums *= fading
            together += sums
        self._kinds = {kind: sums for kind, sums in self._kinds.items() if sums[0, 0] >= _GONE}
        # Features that never varied alone cannot be told apart; a little ridge shares the time among them.
        scale = np.sqrt(np.diag(together)) + 1e-12
        normal = (together[:, :-1] / np.outer(scale, scale) + 1e-4 * np.eye(len(scale))).tolist()
        right = (together[:, -1] / scale).tolist()
        found = (self.coefficients * scale).tolist()
        # Coordinate descent, and no call into a linear algebra library: its threads would wake for four
        # numbers and take a core from the model's.
        for _ in range(_SWEEPS):
            for i, row in enumerate(normal):
                rest = sum(a * x for a, x in zip(row, found, strict=True)) - row[i] * found[i]
                found[i] = max(0.0, (right[i] - rest) / row[i])
        self.coefficients = np.array(found) / scale

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """features [..., F] -> seconds [...]."""
        return (features * self.coefficients).sum(-1)
