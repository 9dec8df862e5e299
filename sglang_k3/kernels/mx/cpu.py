"""MXFP4 weights to floats on a CPU, by table: the step before every matrix product of an expert."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from sglang_k3.kernels import registry
from sglang_k3.kernels.mx.reference import BLOCK, E2M1, E8M0
from sglang_k3.kernels.split import over_items

_CODES = np.array([*E2M1, *(-value for value in E2M1)], dtype=np.float32)
_SCALES = np.array(E8M0, dtype=np.float32)


@registry.register("mx.dequantize_mxfp4", "numba_table", preference=10, exact=True)
def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """packed u8 [R, C/2], scale u8 [R, C/32] -> [R, C] in dtype. Exact in fp32 and bf16."""
    out = torch.empty(packed.shape[0], packed.shape[1] * 2, dtype=torch.float32)
    codes, scales = packed.contiguous().numpy(), scale.contiguous().numpy()
    over_items(_dequantize, packed.shape[0], out.numel(), codes, scales, _CODES, _SCALES, out.numpy())
    return out.to(dtype)


@njit(cache=True, nogil=True, error_model="numpy")
def _dequantize(
    first: int,
    last: int,
    packed: np.ndarray,
    scale: np.ndarray,
    codes: np.ndarray,
    scales: np.ndarray,
    out: np.ndarray,
) -> None:
    half = BLOCK // 2
    for r in range(first, last):
        for b in range(scale.shape[1]):
            step = scales[scale[r, b]]
            for i in range(b * half, (b + 1) * half):
                byte = packed[r, i]
                out[r, 2 * i] = codes[byte & 15] * step
                out[r, 2 * i + 1] = codes[byte >> 4] * step
