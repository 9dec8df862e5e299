"""gated_rms_norm on a CPU: numba, one head row at a time, exact."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit

from sglang_k3.kernels.registry import register
from sglang_k3.kernels.row_math import dot, float_rows, fp32_or_bf16, sigmoid
from sglang_k3.kernels.split import over_items

_ONE = np.float32(1)


@njit(cache=True, nogil=True, error_model="numpy")
def _head(o, gate, weight, eps, y) -> None:
    """One row [V] of each argument."""
    factor = _ONE / math.sqrt(dot(o, o) / np.float32(o.shape[0]) + eps)
    for i in range(o.shape[0]):
        y[i] = o[i] * factor * weight[i] * sigmoid(gate[i])


@njit(cache=True, nogil=True, error_model="numpy")
def _heads(first, last, o, gate, weight, eps, y) -> None:
    for row in range(first, last):
        _head(o[row], gate[row], weight, eps, y[row])


@register("gated_rms_norm", "numba", preference=10, exact=True, supports=fp32_or_bf16)
def gated_rms_norm(o: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `reference.gated_rms_norm`."""
    rows = (o.shape[0] * o.shape[1], o.shape[2])
    y = torch.empty(gate.shape, dtype=torch.float32)
    over_items(
        _heads,
        rows[0],
        o.numel(),
        float_rows(o).reshape(rows),
        float_rows(gate).reshape(rows),
        float_rows(weight),
        np.float32(eps),
        y.numpy().reshape(rows),
    )
    return y.to(gate.dtype)
