"""Linear maps on a CPU: torch's own product, and dot products whose rows do not depend on the batch.

A BLAS picks its kernel, and with it the order of every sum, by the number of rows: torch's fp32 product of
one row differs from the same row among eight. row_dots.py spells the order out instead, which also beats a
BLAS wherever rows are few.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_k3.kernels import registry
from sglang_k3.kernels.linear.row_dots import batched_row_dots, row_dots
from sglang_k3.kernels.row_math import fp32_only, fp32_or_plain_bf16
from sglang_k3.kernels.split import threads_for

FEW_ROWS = 16
"""Rows below which dot products beat a BLAS (benchmarks/kernels.py)."""

_TILE_NUMBERS = 1 << 22
"""Of a widened piece of a weight: it fits a third-level cache, and starting its product costs little."""


@registry.register("linear", "torch", preference=10)
def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, In], weight [Out, In] -> [T, Out] in x's dtype, by torch's linear."""
    return F.linear(x, weight)


@registry.register("linear", "few_rows_or_fp32", preference=20, supports=fp32_or_plain_bf16)
def linear_by_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, In], weight [Out, In], each fp32 or bf16 -> [T, Out] in x's dtype; sums in fp32.

    Few rows by dot products, many by an fp32 product. A CPU without bf16 instructions emulates them at a
    quarter of fp32's speed, so a bf16 weight is widened, a tile at a time.
    """
    if x.shape[0] < FEW_ROWS:
        return row_dots(x, weight)
    with threads_for(2 * x.shape[0] * weight.numel()):
        if weight.dtype == torch.float32:
            return F.linear(x.float(), weight).to(x.dtype)
        wide = x.float()
        out = torch.empty(x.shape[0], weight.shape[0])
        tile = max(16, _TILE_NUMBERS // max(weight.shape[1], 1))
        for start in range(0, weight.shape[0], tile):
            part = weight[start : start + tile].detach().float()
            torch.mm(wide, part.T, out=out[:, start : start + tile])
        return out.to(x.dtype)


@registry.register("linear", "row_dots", preference=5, exact=True, supports=fp32_only)
def linear_row_dots(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, In] fp32, weight [Out, In] fp32 -> [T, Out] fp32: an output sees its own two rows alone."""
    return row_dots(x, weight)


@registry.register("linear_batched", "torch", preference=10)
def linear_batched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, In], weight [H, Out, In] -> [T, H, Out] in x's dtype, one product per head."""
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


@registry.register("linear_batched", "few_rows_or_fp32", preference=20, supports=fp32_or_plain_bf16)
def linear_batched_by_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, In], weight [H, Out, In] -> [T, H, Out] in x's dtype; see `linear_by_rows`."""
    if x.shape[0] < FEW_ROWS:
        return batched_row_dots(x, weight)
    with threads_for(2 * x.shape[0] * weight.numel()):
        return linear_batched(x.float(), weight.float()).to(x.dtype)


@registry.register("linear_batched", "row_dots", preference=5, exact=True, supports=fp32_only)
def linear_batched_row_dots(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, In] fp32, weight [H, Out, In] fp32 -> [T, H, Out] fp32; see `linear_row_dots`."""
    return batched_row_dots(x, weight)
