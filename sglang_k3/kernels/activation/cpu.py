"""Gated activations on a CPU, written out in fp32 arithmetic.

torch's tanh and sigmoid give other bits in a vector's tail than in its body, so an element's result
would depend on where its row starts. These give the same bits wherever the element stands.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from sglang_k3.kernels import registry
from sglang_k3.kernels.activation.reference import int8_rows
from sglang_k3.kernels.mx.reference import quantize_mxfp8
from sglang_k3.kernels.row_math import exp, float_rows, fp32_or_bf16, sigmoid
from sglang_k3.kernels.split import over_items

_ZERO = np.float32(0)
_ONE = np.float32(1)
_TWO = np.float32(2)
# Below this |x| tanh is x plus x^3 times a polynomial in x^2 (minimax on the interval, highest power
# first): 1 - 2 / (e^2x + 1) would cancel there.
_TANH_SMALL = np.float32(0.625)
_TANH_4 = np.float32(-5.70498872745e-3)
_TANH_3 = np.float32(2.06390887954e-2)
_TANH_2 = np.float32(-5.37397155531e-2)
_TANH_1 = np.float32(1.33314422036e-1)
_TANH_0 = np.float32(-3.33332819422e-1)


@registry.register("activation.gated", "numba", preference=10, exact=True, supports=fp32_or_bf16)
def gated(gate_up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """gate_up [T, 2I] = [gate | up] -> [T, I] in its dtype; the formulas of the reference, in fp32."""
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=torch.float32)
    work = (gate_up.shape[0], gate_up.numel())
    rows = float_rows(gate_up)
    if beta is None:
        over_items(_silu, *work, rows, out.numpy())
    elif linear_beta is None:
        over_items(_situ, *work, rows, np.float32(beta), out.numpy())
    else:
        over_items(_situ_clipped, *work, rows, np.float32(beta), np.float32(linear_beta), out.numpy())
    return out.to(gate_up.dtype)


# The quantised forms are an NPU's, which saves a pass over memory by them; here they are their two parts, and
# each part gives a row's bits whatever the other rows are.


@registry.register("activation.gated_mxfp8", "numba", preference=10, exact=True, supports=fp32_or_bf16)
def gated_mxfp8(
    gate_up: torch.Tensor, beta: float | None, linear_beta: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.gated_mxfp8`."""
    return quantize_mxfp8(gated(gate_up.float(), beta, linear_beta))


@registry.register("activation.gated_int8", "numba", preference=10, exact=True, supports=fp32_or_bf16)
def gated_int8(
    gate_up: torch.Tensor, beta: float | None, linear_beta: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.gated_int8`."""
    return int8_rows(gated(gate_up.float(), beta, linear_beta))


@njit(cache=True, nogil=True, error_model="numpy")
def tanh(x: np.float32) -> np.float32:
    """tanh in fp32 within 2 units in the last place."""
    size = abs(x)
    square = x * x
    series = (((_TANH_4 * square + _TANH_3) * square + _TANH_2) * square + _TANH_1) * square + _TANH_0
    y = _ONE - _TWO / (exp(size + size) + _ONE)
    if size < _TANH_SMALL:
        y = size + size * square * series
    return -y if x < _ZERO else y


@njit(cache=True, nogil=True, error_model="numpy")
def silu(gate: np.float32, up: np.float32) -> np.float32:
    return gate * sigmoid(gate) * up


@njit(cache=True, nogil=True, error_model="numpy")
def situ(gate: np.float32, up: np.float32, beta: np.float32) -> np.float32:
    return beta * tanh(gate / beta) * sigmoid(gate) * up


@njit(cache=True, nogil=True, error_model="numpy")
def situ_clipped(gate: np.float32, up: np.float32, beta: np.float32, linear_beta: np.float32) -> np.float32:
    return situ(gate, linear_beta * tanh(up / linear_beta), beta)


@njit(cache=True, nogil=True, error_model="numpy")
def _silu(first: int, last: int, gate_up: np.ndarray, out: np.ndarray) -> None:
    width = out.shape[1]
    for t in range(first, last):
        for i in range(width):
            out[t, i] = silu(gate_up[t, i], gate_up[t, width + i])


@njit(cache=True, nogil=True, error_model="numpy")
def _situ(first: int, last: int, gate_up: np.ndarray, beta: np.float32, out: np.ndarray) -> None:
    width = out.shape[1]
    for t in range(first, last):
        for i in range(width):
            out[t, i] = situ(gate_up[t, i], gate_up[t, width + i], beta)


@njit(cache=True, nogil=True, error_model="numpy")
def _situ_clipped(
    first: int, last: int, gate_up: np.ndarray, beta: np.float32, linear_beta: np.float32, out: np.ndarray
) -> None:
    width = out.shape[1]
    for t in range(first, last):
        for i in range(width):
            out[t, i] = situ_clipped(gate_up[t, i], gate_up[t, width + i], beta, linear_beta)
