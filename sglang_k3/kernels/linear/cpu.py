"""Linear maps on a CPU: torch's own, and fixed row blocks whose rows do not depend on the batch.

A BLAS picks its kernel, and with it the order of every sum, by the number of rows: torch's fp32 product
of one row differs from the same row among eight. Handing it blocks of one fixed height, padded with zero
rows, leaves it no choice to make. The height of 16 also keeps each fp32 block on a 64-byte boundary
whatever the row length, and a BLAS may treat unaligned data differently.

No BLAS promises that a row's sums do not depend on its place in the block either, so that is tried once
per weight shape; a shape that fails takes the slow loops of rows.py from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F

from sglang_k3.kernels import registry
from sglang_k3.kernels.linear.rows import batched_rows, rows
from sglang_k3.kernels.native import native_bf16
from sglang_k3.kernels.registry import Call

logger = logging.getLogger(__name__)

ROWS = 16

WIDE_ROWS = 8
"""Rows from which widening a bf16 weight costs less than it saves."""

_TILE_NUMBERS = 1 << 18

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]

_tried: dict[tuple[object, ...], bool] = {}


def _fp32_only(call: Call) -> str | None:
    return None if call.dtype == torch.float32 else f"fixed row blocks are float32, not {call.dtype}"


@registry.register("linear", "torch", preference=10)
def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, In], weight [Out, In] -> [T, Out] in x's dtype, by torch's linear."""
    return F.linear(x, weight)


def _bf16_without_instructions(call: Call) -> str | None:
    if call.dtype != torch.bfloat16:
        return f"widens bfloat16; {call.dtype} needs no widening"
    return "this CPU multiplies bfloat16 matrices itself" if native_bf16() else None


@registry.register("linear", "widened", preference=20, supports=_bf16_without_instructions)
def linear_widened(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, In] bf16, weight [Out, In] bf16 -> [T, Out] bf16, by fp32 products from WIDE_ROWS rows on.

    A CPU without bf16 instructions emulates them, at a quarter of the speed of fp32. The weight is widened
    a tile at a time, so that a tile is read from a cache by its product.
    """
    if x.shape[0] < WIDE_ROWS:
        return F.linear(x, weight)
    wide = x.float()
    out = torch.empty(x.shape[0], weight.shape[0])
    tile = max(16, _TILE_NUMBERS // max(weight.shape[1], 1))
    for start in range(0, weight.shape[0], tile):
        part = weight[start : start + tile].detach().float()
        torch.mm(wide, part.T, out=out[:, start : start + tile])
    return out.to(x.dtype)


@registry.register("linear", "row_blocks", preference=5, exact=True, supports=_fp32_only)
def linear_row_blocks(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, In] fp32, weight [Out, In] fp32 -> [T, Out] fp32, one product per block of ROWS rows."""
    weight = weight.detach()  # a product into a given output refuses what may need a gradient
    if not _keeps_rows(_multiply, weight, (weight.shape[1],), (weight.shape[0],)):
        return rows(x, weight)
    return _by_blocks(_multiply, x, weight, (weight.shape[0],))


@registry.register("linear_batched", "torch", preference=10)
def linear_batched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, In], weight [H, In, Out] -> [T, H, Out] in x's dtype, one product per head."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


@registry.register("linear_batched", "widened", preference=20, supports=_bf16_without_instructions)
def linear_batched_widened(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, In] bf16, weight [H, In, Out] bf16 -> [T, H, Out] bf16; see `linear_widened`."""
    if x.shape[0] < WIDE_ROWS:
        return linear_batched(x, weight)
    return torch.bmm(x.transpose(0, 1).float(), weight.float()).transpose(0, 1).to(x.dtype)


@registry.register("linear_batched", "row_blocks", preference=5, exact=True, supports=_fp32_only)
def linear_batched_row_blocks(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, In] fp32, weight [H, In, Out] fp32 -> [T, H, Out] fp32, blocks of ROWS rows."""
    weight = weight.detach()
    heads, inputs, outputs = weight.shape
    if not _keeps_rows(_multiply_heads, weight, (heads, inputs), (heads, outputs)):
        return batched_rows(x, weight)
    return _by_blocks(_multiply_heads, x, weight, (heads, outputs))


def _multiply(block: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(block, weight.T, out=out)


def _multiply_heads(block: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    # Contiguous per head: a strided operand may take another path inside the BLAS.
    out.copy_(torch.bmm(block.transpose(0, 1).contiguous(), weight).transpose(0, 1))


def _by_blocks(
    product: Product, x: torch.Tensor, weight: torch.Tensor, row_shape: tuple[int, ...]
) -> torch.Tensor:
    count = x.shape[0]
    height = -(-count // ROWS) * ROWS
    padded = x.new_zeros(height, *x.shape[1:])
    padded[:count] = x
    out = x.new_empty(height, *row_shape)
    for start in range(0, height, ROWS):
        product(padded[start : start + ROWS], weight, out[start : start + ROWS])
    return out[:count]


def _keeps_rows(
    product: Product, weight: torch.Tensor, in_shape: tuple[int, ...], out_shape: tuple[int, ...]
) -> bool:
    """Whether a row has the same bits one place further down the block, and beside rows of zeros."""
    key = (product, weight.shape, weight.stride(), torch.get_num_threads())
    if key not in _tried:
        generator = torch.Generator().manual_seed(0)
        block = torch.randn(ROWS, *in_shape, generator=generator)
        alone = torch.zeros_like(block)
        alone[0] = block[0]
        whole, moved, lone = (weight.new_empty(ROWS, *out_shape) for _ in range(3))
        for rows_in, rows_out in ((block, whole), (block.roll(1, 0), moved), (alone, lone)):
            product(rows_in, weight, rows_out)
        _tried[key] = torch.equal(moved.roll(-1, 0), whole) and torch.equal(lone[0], whole[0])
        if not _tried[key]:
            logger.warning("this BLAS orders sums by row for weight %s: exact mode loops", list(weight.shape))
    return _tried[key]
