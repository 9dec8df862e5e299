"""Arguments of one call, copied often enough that no call finds its own in a cache.

All cold tensors of all copies lie in one slab, so a probe can walk over the very bytes that the kernels use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Arguments = tuple[Any, ...]

_ALIGNMENT = 64


class Rotation:
    """Argument tuples in a fixed cyclic order; `next` goes on where the last caller stopped.

    slab: uint8 [bytes], or None where nothing is cold. calls: the tuples in order.
    """

    def __init__(self, slab: torch.Tensor | None, calls: Sequence[Arguments]) -> None:
        assert calls, "a rotation needs at least one call"
        self.slab = slab
        self.calls = calls
        self._position = 0

    def next(self) -> Arguments:
        arguments = self.calls[self._position]
        self._position = (self._position + 1) % len(self.calls)
        return arguments

    @property
    def cold_bytes(self) -> int:
        return 0 if self.slab is None else self.slab.numel()


def rotation(
    arguments: Arguments,
    cold: Sequence[int],
    at_least: int,
    expand: Callable[[Arguments], Sequence[Arguments]] = lambda arguments: [arguments],
) -> Rotation:
    """Copies of `arguments` until their cold tensors (by index) come to `at_least` bytes.

    `expand` turns one copy into several calls that use its tensors one part after another, such as groups of
    experts of one stack of weights; a part must not be used twice by one copy's calls.
    """
    if not cold:
        return Rotation(None, expand(arguments))
    sizes = [-(-_bytes(arguments[index]) // _ALIGNMENT) * _ALIGNMENT for index in cold]
    copies = max(1, math.ceil(at_least / sum(_bytes(arguments[index]) for index in cold)))
    slab = torch.empty(copies * sum(sizes) + _ALIGNMENT, dtype=torch.uint8)
    slab = slab[-slab.data_ptr() % _ALIGNMENT :][: copies * sum(sizes)]
    slab.zero_()  # the padding is read too
    calls: list[Arguments] = []
    offset = 0
    for _ in range(copies):
        placed = list(arguments)
        for index, size in zip(cold, sizes, strict=True):
            placed[index] = _place(arguments[index], slab[offset : offset + size])
            offset += size
        calls.extend(expand(tuple(placed)))
    return Rotation(slab, calls)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _place(tensor: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of the tensor in the first bytes of `room`."""
    return room[: _bytes(tensor)].view(tensor.dtype).view(tensor.shape).copy_(tensor)
