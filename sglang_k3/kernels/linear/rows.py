"""Linear maps row by row with every sum's order spelled out: exact on any machine, and slow."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from sglang_k3.kernels.row_math import dot, float_rows
from sglang_k3.kernels.threads import use_threads_for


def rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, In] fp32, weight [Out, In] fp32 -> [T, Out] fp32."""
    out = torch.empty(x.shape[0], weight.shape[0])
    use_threads_for(x.shape[0] * weight.numel())
    _rows(float_rows(x), float_rows(weight), out.numpy())
    return out


def batched_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, In] fp32, weight [H, In, Out] fp32 -> [T, H, Out] fp32."""
    out = torch.zeros(x.shape[0], weight.shape[0], weight.shape[2])
    use_threads_for(x.shape[0] * weight.numel())
    _batched_rows(float_rows(x), float_rows(weight), out.numpy())
    return out


@njit(cache=True, nogil=True, error_model="numpy", parallel=True)
def _rows(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
    for o in prange(out.shape[1]):
        for t in range(out.shape[0]):
            out[t, o] = dot(x[t], weight[o])


@njit(cache=True, nogil=True, error_model="numpy", parallel=True)
def _batched_rows(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
    for h in prange(out.shape[1]):
        for t in range(out.shape[0]):
            for i in range(x.shape[2]):
                for o in range(out.shape[2]):
                    out[t, h, o] += x[t, h, i] * weight[h, i, o]
