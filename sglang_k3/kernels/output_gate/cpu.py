"""MLA's output gate on a CPU, in one pass and with fixed bits for every element."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from sglang_k3.kernels import registry
from sglang_k3.kernels.row_math import float_rows, fp32_or_bf16, sigmoid
from sglang_k3.kernels.split import over_items


@registry.register("output_gate", "numba", preference=10, exact=True, supports=fp32_or_bf16)
def output_gate(o: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """o [T, C], gate [T, C] -> o * sigmoid(gate) [T, C] in o's dtype, computed in fp32."""
    out = torch.empty(o.shape, dtype=torch.float32)
    over_items(_gate, o.shape[0], o.numel(), float_rows(o), float_rows(gate), out.numpy())
    return out.to(o.dtype)


@njit(cache=True, nogil=True, error_model="numpy")
def _gate(first: int, last: int, o: np.ndarray, gate: np.ndarray, out: np.ndarray) -> None:
    for t in range(first, last):
        for i in range(o.shape[1]):
            out[t, i] = o[t, i] * sigmoid(gate[t, i])
