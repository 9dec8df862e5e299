"""Linear maps on a CPU: torch's own, and fixed row blocks whose rows do not depend on the batch.

A BLAS picks its kernel, and with it the order of every sum, by the number of rows: torch's fp32 product
of one row differs from the same row among eight. Handing it blocks of one fixed height, padded with zero
rows, leaves it no choice to make. The height of 16 also keeps each fp32 block on a 64-byte boundary
whatever the row length, and a BLAS may treat unaligned data differently.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_k3.kernels import registry
from sglang_k3.kernels.registry import Call

ROWS = 16


def _fp32_only(call: Call) -> str | None:
    return None if call.dtype == torch.float32 else f"fixed row blocks are float32, not {call.dtype}"


@registry.register("linear", "torch", preference=10)
def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, In], weight [Out, In] -> [T, Out] in x's dtype, by torch's linear."""
    return F.linear(x, weight)


@registry.register("linear", "row_blocks", preference=5, exact=True, supports=_fp32_only)
def linear_row_blocks(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, In] fp32, weight [Out, In] fp32 -> [T, Out] fp32, one product per block of ROWS rows."""
    rows = x.shape[0]
    padded = _pad_rows(x)
    out = x.new_empty(padded.shape[0], weight.shape[0])
    for start in range(0, padded.shape[0], ROWS):
        torch.mm(padded[start : start + ROWS], weight.T, out=out[start : start + ROWS])
    return out[:rows]


@registry.register("linear_batched", "torch", preference=10)
def linear_batched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, In], weight [H, In, Out] -> [T, H, Out] in x's dtype, one product per head."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


@registry.register("linear_batched", "row_blocks", preference=5, exact=True, supports=_fp32_only)
def linear_batched_row_blocks(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, In] fp32, weight [H, In, Out] fp32 -> [T, H, Out] fp32, blocks of ROWS rows."""
    rows = x.shape[0]
    padded = _pad_rows(x)
    out = x.new_empty(padded.shape[0], weight.shape[0], weight.shape[2])
    for start in range(0, padded.shape[0], ROWS):
        # Contiguous per head: a strided operand may take another path inside the BLAS.
        block = padded[start : start + ROWS].transpose(0, 1).contiguous()
        out[start : start + ROWS] = torch.bmm(block, weight).transpose(0, 1)
    return out[:rows]


def _pad_rows(x: torch.Tensor) -> torch.Tensor:
    """A copy of x with zero rows added up to a multiple of ROWS."""
    padded = x.new_zeros(-(-x.shape[0] // ROWS) * ROWS, *x.shape[1:])
    padded[: x.shape[0]] = x
    return padded
