"""RMSNorm on a CPU: one row at a time, sums in a fixed order, so it serves the exact mode too."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from sglang_k3.kernels import registry
from sglang_k3.kernels.row_math import dot, float_rows, fp32_or_bf16
from sglang_k3.kernels.split import over_items


@registry.register("rms_norm", "numba_rows", preference=10, exact=True, supports=fp32_or_bf16)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, D], weight [D] -> [T, D] in x's dtype: x / sqrt(mean(x^2) + eps), rounded, times weight."""
    normed = torch.empty(x.shape, dtype=torch.float32)
    if x.dtype == torch.float32:
        rows, scale = float_rows(x), float_rows(weight)
        over_items(_normalise_and_scale, x.shape[0], x.numel(), rows, scale, np.float32(eps), normed.numpy())
        return normed
    over_items(_normalise, x.shape[0], x.numel(), float_rows(x), np.float32(eps), normed.numpy())
    return (normed.to(x.dtype) * weight).to(x.dtype)


@njit(cache=True, nogil=True, error_model="numpy")
def _normalise(first: int, last: int, x: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    width = x.shape[1]
    for t in range(first, last):
        row = x[t]
        inverse = np.float32(1) / np.sqrt(dot(row, row) / np.float32(width) + eps)
        for d in range(width):
            out[t, d] = row[d] * inverse


@njit(cache=True, nogil=True, error_model="numpy")
def _normalise_and_scale(
    first: int, last: int, x: np.ndarray, weight: np.ndarray, eps: np.float32, out: np.ndarray
) -> None:
    width = x.shape[1]
    for t in range(first, last):
        row = x[t]
        inverse = np.float32(1) / np.sqrt(dot(row, row) / np.float32(width) + eps)
        for d in range(width):
            out[t, d] = row[d] * inverse * weight[d]
