"""A batch's lengths for an operator that takes them as integers of the host."""

from __future__ import annotations

import torch


class CopiedLengths:
    """One copy a step, started before the layers, waited for by the first that asks.

    counts, prefix_lens [N] int64, on the device: new rows of each request, and cached ones. A call gives, as
    lists, the new rows and the positions with them.
    """

    def __init__(self, counts: torch.Tensor, prefix_lens: torch.Tensor) -> None:
        self._there = torch.empty(2, len(counts), dtype=torch.int64, pin_memory=True)
        self._there.copy_(torch.stack([counts, prefix_lens + counts]), non_blocking=True)
        self._arrived = torch.get_device_module(counts.device).Event()
        self._arrived.record()
        self._lists: tuple[list[int], list[int]] | None = None

    def __call__(self) -> tuple[list[int], list[int]]:
        if self._lists is None:
            self._arrived.synchronize()
            rows, positions = self._there.tolist()
            self._lists = rows, positions
        return self._lists
