"""Linear maps as one dot product per output, in the order of `row_math.dot`, several of them at a time.

Each weight is widened in a register and meets two rows of x; no thread is woken for little. A BLAS is made
for many rows: for one it costs tens of microseconds before it starts, and more to gather its threads. And it
picks the order of its sums by the number of rows, which this does not: an output depends on its own row of x
and of the weight alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

from sglang_k3.kernels.row_math import LANES, array_of, dot, float_rows, fma, widen
from sglang_k3.kernels.row_vectors import ROWS, table_dots, table_matrix_dots
from sglang_k3.kernels.split import over_items

_TILE = 32
"""Rows of x that meet a weight while it is in a first-level cache; they stay in a second-level one."""


def row_dots(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, In], weight [Out, In], fp32 or bf16 -> [T, Out] in x's dtype; sums in fp32."""
    out = torch.empty(x.shape[0], weight.shape[0])
    over_items(
        _row_dots,
        -(-weight.shape[0] // ROWS),
        x.shape[0] * weight.numel() // LANES,
        float_rows(x),
        _matrix(weight),
        out.numpy(),
    )
    return out if x.dtype == torch.float32 else out.to(x.dtype)


def batched_row_dots(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, In], weight [H, Out, In], fp32 or bf16 -> [T, H, Out] in x's dtype; sums in fp32."""
    heads, outputs = weight.shape[:2]
    out = torch.empty(heads, x.shape[0], outputs)
    over_items(
        _heads,
        heads,
        x.shape[0] * weight.numel() // LANES,
        float_rows(x.transpose(0, 1)),
        _matrix(weight),
        out.numpy(),
    )
    return out.transpose(0, 1).to(x.dtype)


def _matrix(weight: torch.Tensor) -> np.ndarray:
    if weight.requires_grad:
        weight = weight.detach()
    return array_of(weight if weight.is_contiguous() else weight.contiguous())


def _wide_element(value: Any) -> Any:
    """Inside numba: the fp32 value of an fp32 number or of bf16 bits."""
    raise NotImplementedError("only inside numba code")


@overload(_wide_element, jit_options={"cache": True})
def _wide_element_for(value):
    if value == types.float32:
        return lambda value: value
    return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


@njit(cache=True, nogil=True, error_model="numpy")
def _two_rows(x, t, weight, o, whole, out) -> None:
    """Rows t and t + 1 of x, outputs o .. o + 3."""
    width = weight.shape[1]
    a0, b0, a1, b1, a2, b2, a3, b3 = table_dots(weight, o, width, x, t, t + 1, whole)
    for i in range(whole, width):
        w0 = _wide_element(weight[o, i])
        w1 = _wide_element(weight[o + 1, i])
        w2 = _wide_element(weight[o + 2, i])
        w3 = _wide_element(weight[o + 3, i])
        a0 = fma(w0, x[t, i], a0)
        b0 = fma(w0, x[t + 1, i], b0)
        a1 = fma(w1, x[t, i], a1)
        b1 = fma(w1, x[t + 1, i], b1)
        a2 = fma(w2, x[t, i], a2)
        b2 = fma(w2, x[t + 1, i], b2)
        a3 = fma(w3, x[t, i], a3)
        b3 = fma(w3, x[t + 1, i], b3)
    out[t, o] = a0
    out[t, o + 1] = a1
    out[t, o + 2] = a2
    out[t, o + 3] = a3
    out[t + 1, o] = b0
    out[t + 1, o + 1] = b1
    out[t + 1, o + 2] = b2
    out[t + 1, o + 3] = b3


@njit(cache=True, nogil=True, error_model="numpy")
def _one_row(x, t, weight, o, whole, out) -> None:
    width = weight.shape[1]
    s0, s1, s2, s3 = table_matrix_dots(weight, o, width, x, t, whole)
    for i in range(whole, width):
        s0 = fma(_wide_element(weight[o, i]), x[t, i], s0)
        s1 = fma(_wide_element(weight[o + 1, i]), x[t, i], s1)
        s2 = fma(_wide_element(weight[o + 2, i]), x[t, i], s2)
        s3 = fma(_wide_element(weight[o + 3, i]), x[t, i], s3)
    out[t, o] = s0
    out[t, o + 1] = s1
    out[t, o + 2] = s2
    out[t, o + 3] = s3


@njit(cache=True, nogil=True, error_model="numpy")
def _row_dots(first, last, x, weight, out) -> None:
    """Items: groups of ROWS outputs. x, out [T, .] fp32, weight [Out, In] fp32 or bf16 bits."""
    outputs, width = weight.shape
    whole = width - width % LANES
    row = np.empty(width, np.float32)
    for tile in range(0, x.shape[0], _TILE):
        end = min(tile + _TILE, x.shape[0])
        for group in range(first, last):
            o = group * ROWS
            if o + ROWS <= outputs:
                paired = end - (end - tile) % 2
                for t in range(tile, paired, 2):
                    _two_rows(x, t, weight, o, whole, out)
                if paired < end:
                    _one_row(x, paired, weight, o, whole, out)
            else:
                for last_row in range(o, outputs):
                    widen(weight[last_row], row)
                    for t in range(tile, end):
                        out[t, last_row] = dot(row, x[t])


@njit(cache=True, nogil=True, error_model="numpy")
def _heads(first, last, x, weight, out) -> None:
    """Items: heads. x [H, T, In] fp32, weight [H, Out, In], out [H, T, Out] fp32."""
    groups = (weight.shape[1] + ROWS - 1) // ROWS
    for h in range(first, last):
        _row_dots(0, groups, x[h], weight[h], out[h])
