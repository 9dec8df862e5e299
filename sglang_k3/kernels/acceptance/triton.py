"""Greedy acceptance of a chain of drafts in Triton for Ascend's vector cores. Not run on hardware."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chain(candidates, chosen, counts, items, rows, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """candidates, chosen [rows, D] int64 -> counts [rows] int64; items = blocks of BR rows; BD >= D."""
    place = tl.arange(0, BD)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        block = item + 0
        first = block.to(tl.int64) * BR
        down = tl.arange(0, BR)
        inside = block * BR + down < rows
        drafted = inside[:, None] & (place < D - 1)[None, :]
        at = down[:, None] * D + place[None, :]
        draft = tl.load(candidates + first * D + at + 1, mask=drafted, other=0)
        choice = tl.load(chosen + first * D + at, mask=drafted, other=0)
        # The first place that differs, or D - 1 where none does: so many drafts stay.
        stays = tl.min(tl.where(drafted & (draft != choice), place[None, :], D - 1), 1)
        tl.store(counts + first + down, stays.to(tl.int64) + 1, mask=inside)
