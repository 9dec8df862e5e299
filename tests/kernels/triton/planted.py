"""Kernels with a fault each, which the checks must find."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def item_a_program(x, BLOCK: tl.constexpr):
    """A program for each item: right, and refused by CANN where items are many."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.zeros([BLOCK], tl.float32))


@triton.jit
def narrow_offset(x, row, items):
    """The offset of a row far into a pool, in 32 bits."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        number = item + 0
        tl.store(x + number * row, 1.0)


@triton.jit
def wide_offset(x, row, items):
    """The same in 64 bits."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        number = item + 0
        tl.store(x + number.to(tl.int64) * row, 1.0)


@triton.jit
def beyond_the_end(x, BLOCK: tl.constexpr):
    """No mask."""
    at = x + tl.arange(0, BLOCK)
    tl.store(at, tl.load(at) + 1.0)


@triton.jit
def whole_state(x, y, items, ROWS: tl.constexpr, K: tl.constexpr):
    """A state's tile [ROWS, K] fp32 and what is made of it: at 256 rows more than a chip holds."""
    at = tl.arange(0, ROWS)[:, None] * K + tl.arange(0, K)[None, :]
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        number = item + 0
        first = number.to(tl.int64) * ROWS * K
        tile = tl.load(x + first + at)
        tl.store(y + first + at, tl.exp(tile) * tile / (tl.sum(tile, 1)[:, None] + tile))
