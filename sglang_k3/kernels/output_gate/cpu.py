"""MLA's output gate on a CPU, in one pass and with fixed bits for every element."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from sglang_k3.kernels import registry
from sglang_k3.kernels.registry import Call
from sglang_k3.kernels.row_math import float_rows, sigmoid, use_torch_threads


def _not_fp64(call: Call) -> str | None:
    return "computes in float32" if call.dtype == torch.float64 else None


@registry.register("output_gate", "numba", preference=10, exact=True, supports=_not_fp64)
def output_gate(o: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """o [T, C], gate [T, C] -> o * sigmoid(gate) [T, C] in o's dtype, computed in fp32."""
    out = torch.empty(o.shape, dtype=torch.float32)
    use_torch_threads()
    _gate(float_rows(o), float_rows(gate), out.numpy())
    return out.to(o.dtype)


@njit(cache=True, nogil=True, parallel=True)
def _gate(o: np.ndarray, gate: np.ndarray, out: np.ndarray) -> None:
    for t in prange(o.shape[0]):
        for i in range(o.shape[1]):
            out[t, i] = o[t, i] * sigmoid(gate[t, i])
