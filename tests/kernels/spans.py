"""Ragged batches for the operators that carry a state from call to call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Spans:
    """The batch arguments of an `extend` operator, in its order. See the references for each."""

    slots: torch.Tensor
    cu_seqlens: torch.Tensor
    fresh: torch.Tensor
    track_offsets: torch.Tensor
    track_slots: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.slots, self.cu_seqlens, self.fresh, self.track_offsets, self.track_slots

    @property
    def tokens(self) -> int:
        return int(self.cu_seqlens[-1])


def spans(
    lengths: Sequence[int],
    slots: Sequence[int] | None = None,
    fresh: Sequence[bool] | None = None,
    tracks: Sequence[tuple[int, int]] | None = None,
) -> Spans:
    """N requests of these lengths; slots default to 1..N, not fresh, nothing tracked.

    `tracks` holds (offset, slot) for each request, (-1, -1) for none.
    """
    count = len(lengths)
    offsets, targets = zip(*tracks, strict=True) if tracks else ([-1] * count, [-1] * count)
    return Spans(
        slots=torch.tensor(
            list(slots) if slots is not None else list(range(1, count + 1)), dtype=torch.int64
        ),
        cu_seqlens=torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0),
        fresh=torch.tensor(list(fresh) if fresh is not None else [False] * count, dtype=torch.bool),
        track_offsets=torch.tensor(offsets, dtype=torch.int64),
        track_slots=torch.tensor(targets, dtype=torch.int64),
    )


def scaled_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative to the largest expected value. NaN when anything is NaN."""
    if want.numel() == 0:
        return 0.0
    difference = (got.double() - want.double()).abs().max()
    return float(difference / want.double().abs().max().clamp(min=1e-30))
