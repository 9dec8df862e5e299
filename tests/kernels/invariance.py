"""The check of exact mode: a row's bits are its own, whatever else is computed with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch

from sglang_k3.kernels import split

Rows = torch.Tensor
Outputs = torch.Tensor | Sequence[torch.Tensor]

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as integers: -0.0 differs from 0.0, and NaN equals itself."""
    tensor = tensor.contiguous()
    return tensor.view(_BITS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch and our kernels on `count` threads, however small the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with mock.patch.multiple(split, _WORTH_THREADS=0, _WORTH_TORCH_THREADS=0):
            yield
    finally:
        torch.set_num_threads(before)


def check_rows_keep_their_bits(compute: Callable[[Rows], Outputs], rows: int) -> None:
    """`compute(index)` takes the rows `index` [n] i64 of its inputs and returns one output row for each,
    or several tensors of them. Asserts equal bits for every row alone, in eights, in reverse, shuffled,
    from each of several offsets, twice over, and with one thread against two."""

    def run(index: Rows) -> Sequence[torch.Tensor]:
        out = compute(index)
        return [out] if isinstance(out, torch.Tensor) else out

    with torch_threads(2):
        whole = run(torch.arange(rows))
    generator = torch.Generator().manual_seed(rows)
    shuffled = torch.randperm(rows, generator=generator)
    alone = {f"row {row} alone": torch.tensor([row]) for row in range(rows)}
    batches = {
        **{f"eight from {start}": torch.arange(start, min(start + 8, rows)) for start in range(0, rows, 3)},
        **{f"from {start}": torch.arange(start, rows) for start in (1, 3, rows // 2)},
        "reverse": torch.arange(rows).flip(0),
        "shuffled": shuffled,
        "eight shuffled": shuffled[:8],
        "twice over": torch.arange(rows).repeat(2),
    }
    for count, given in ((1, {**alone, **batches}), (2, batches)):
        with torch_threads(count):
            for name, index in given.items():
                for position, (got, want) in enumerate(zip(run(index), whole, strict=True)):
                    assert same_bits(got, want[index]), f"{name}, {count} threads, output {position}"
    with torch_threads(1):
        for got, want in zip(run(torch.arange(rows)), whole, strict=True):
            assert same_bits(got, want), "one thread against two"
