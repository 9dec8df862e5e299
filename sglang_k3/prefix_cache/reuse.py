"""How likely a path of the tree is to be used again, learned from the requests that came.

Two things are learned. When: of paths of one kind, how many come back at which age, counted in requests that
started since (never in seconds: every rank has to find the same). Where: of requests that come back to a
path, how far in front of its end they leave it, as an edit does.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np

_EDGES = np.array(
    [0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024, 2048, 4096],
    np.float64,
)
_WIDTHS = np.diff(_EDGES)
_PARTS = 6
_USUAL_AGE, _USUAL_WEIGHT = 8.0, 6.0
_TURNS_AHEAD, _FADE = 3, 0.9


class Kind(IntEnum):
    """What a path is. NEW: nobody has come back to it. ALIVE: somebody has. LEFT: a later request left it in
    front of its end. FORK: not a path's end but a place where two part; SHARED: more than once."""

    NEW = 0
    ALIVE = 1
    LEFT = 2
    FORK = 3
    SHARED = 4


_PRIOR = np.array([0.5, 1.0, 0.25, 0.1, 0.5])
"""Returns that each kind is credited with before anything was seen."""


class Returns:
    """When paths come back. Ages are in requests; a kind's hazard is its returns by the requests it
    waited."""

    def __init__(self) -> None:
        self._returns = np.zeros((len(Kind), len(_WIDTHS)))
        self._waited = np.zeros((len(Kind), len(_WIDTHS)))

    def came_back(self, kind: Kind, age: int) -> None:
        self._returns[kind, _bin(age)] += 1
        self._waited[kind] += _exposure(np.array([age]))[0]

    def gone(self, kind: Kind, age: int) -> None:
        """Not seen again up to this age; what would have come later is not known."""
        self._waited[kind] += _exposure(np.array([age]))[0]

    def indices(self, alive: Iterable[tuple[Kind, int]]) -> np.ndarray:
        """[kinds, bins] uses a request that a path's slot can be expected to earn, by its kind and age: the
        best, over how long one would go on waiting, of P(comes back in that time) by the time waited
        (Gittins). alive: kind and age of the paths that are still there; they have waited too."""
        waited = self._waited.copy()
        ages: list[list[int]] = [[] for _ in Kind]
        for kind, age in alive:
            ages[kind].append(age)
        for kind, found in enumerate(ages):
            if found:
                waited[kind] += _exposure(np.array(found)).sum(0)
        # What a kind does at an age that few have reached is guessed from what it does at any age.
        usual = (self._returns.sum(1) + _PRIOR * _USUAL_WEIGHT) / (waited.sum(1) + _USUAL_AGE * _USUAL_WEIGHT)
        guess = usual[:, None] * np.sqrt(_USUAL_AGE / (_EDGES[:-1] + _USUAL_AGE))
        hazard = np.minimum((self._returns + guess * _WIDTHS) / (waited + _WIDTHS), 0.95)
        stay = (1 - hazard) ** _WIDTHS
        alive_at = np.cumprod(np.concatenate([np.ones((len(Kind), 1)), stay], axis=1), axis=1)
        waits = np.cumsum(alive_at[:, :-1] * (1 - stay) / hazard, axis=1)
        waits = np.concatenate([np.zeros((len(Kind), 1)), waits], axis=1)
        best = np.zeros_like(hazard)
        for start in range(len(_WIDTHS)):
            came = alive_at[:, start : start + 1] - alive_at[:, start + 1 :]
            took = waits[:, start + 1 :] - waits[:, start : start + 1]
            best[:, start] = (came / np.maximum(took, 1e-300)).max(axis=1)
        return best


class Departures:
    """Where requests leave the path that they come back to: at its end, or in front of it."""

    def __init__(self) -> None:
        self._counts = np.full(_PARTS, 1.0 / _PARTS)
        self._at_end = 2.0
        self._grown, self._growths = 256.0, 1.0
        self._refresh()

    def left(self, depth: int, length: int) -> None:
        """A request left a path of `length` tokens behind `depth` of them."""
        if depth >= length:
            self._at_end += 1
        else:
            self._counts[min(_PARTS - 1, int((length - depth) / length * _PARTS))] += 1
        self._refresh()

    def grew(self, tokens: int) -> None:
        """A turn made its path longer."""
        self._grown += tokens
        self._growths += 1

    def _refresh(self) -> None:
        total = self._at_end + self._counts.sum()
        steps = np.concatenate([[self._at_end], self._counts]) / total
        self._reached = np.cumsum(steps).tolist()

    def uses(self, depth: int, length: int) -> float:
        """Expected uses of a state at `depth`, with none deeper on the path, when its next turns come: what
        is left in front of `depth` is not its own. A later turn starts from the end of the one before it,
        unless it is left in front of that too; the more the path has grown, the further back this state
        is."""
        found = self.beyond(depth, length)
        growth, weight = self._grown / self._growths, 1.0
        for turn in range(1, _TURNS_AHEAD + 1):
            weight *= _FADE
            later = length + turn * growth
            found += weight * max(0.0, self.beyond(depth, later) - self.beyond(length + growth, later))
        return found

    def beyond(self, depth: float, length: float) -> float:
        """P(a request that comes back leaves the path at `depth` tokens or later)."""
        if length <= 0:
            return 1.0
        place = max(0.0, (length - depth) / length * _PARTS)
        whole = min(_PARTS - 1, int(place))
        low, high = self._reached[whole], self._reached[whole + 1]
        return low + (high - low) * min(1.0, place - whole)


def bin_of(age: int) -> int:
    """The column of `Returns.indices`."""
    return _bin(age)


def _bin(age: int) -> int:
    return int(min(len(_WIDTHS) - 1, np.searchsorted(_EDGES, age, side="right") - 1))


def _exposure(ages: np.ndarray) -> np.ndarray:
    """[ages, bins] requests that a path of this age has waited in each bin."""
    return np.clip(ages[:, None] - _EDGES[:-1], 0, _WIDTHS)
