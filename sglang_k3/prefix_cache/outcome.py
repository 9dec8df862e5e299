"""What a prompt found in the prefix cache, and why it did not find more."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

REASONS = {
    "evicted": "a state stood there once and gave its slot to another",
    "none_stored": "nobody has kept a state there",
    "off_grid": "between two depths at which a state can stand (0 where every page can hold one)",
    "no_slot": "a state was there, and no slot to copy it into",
}


@dataclass(frozen=True)
class Outcome:
    """Tokens of one prompt, counted when its request starts.

    hit: restored, KV and state. The others: KV was there and was computed again, by reason (`REASONS`).
    """

    hit: int = 0
    evicted: int = 0
    none_stored: int = 0
    off_grid: int = 0
    no_slot: int = 0

    @property
    def lost(self) -> dict[str, int]:
        return {reason: getattr(self, reason) for reason in REASONS}

    def without_slot(self) -> Outcome:
        """The hit is given up, for want of a slot."""
        return dataclasses.replace(self, hit=0, no_slot=self.no_slot + self.hit)


def outcome_of(kv: int, hit: int, grid: int, evicted_to: int) -> Outcome:
    """kv: tokens whose KV is cached. hit: depth of the deepest state among them. grid: tokens between two
    depths at which a state can stand. evicted_to: deepest place that lost its state, `hit` if none."""
    reachable = max(hit, kv // grid * grid)
    return Outcome(hit, evicted_to - hit, reachable - evicted_to, kv - reachable)
