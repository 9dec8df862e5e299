"""Where a continuation starts to go round in circles: a small greedy model soon does, and flatters every
draft."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD = 32
REPEATS = 3


def before_repetition(tokens: Sequence[int], period: int = LONGEST_PERIOD, repeats: int = REPEATS) -> int:
    """How many tokens there are up to the end of the first `repeats` rounds of a period of at most `period`.

    All of them if no period repeats that often.
    """
    for end in range(repeats, len(tokens) + 1):
        for width in range(1, min(period, end // repeats) + 1):
            tail = tokens[end - width * repeats : end]
            if all(tail[i] == tail[i + width] for i in range(len(tail) - width)):
                return end
    return len(tokens)
