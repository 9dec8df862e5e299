"""Oracles of the MX formats (OCP Microscaling Formats v1.0): blocks of 32 columns share one E8M0 scale.

A scale byte s stands for 2^(s - 127), 255 for NaN. MXFP4 elements are E2M1 codes, two a byte, the even
column in the low nibble. Each output element depends on its own block alone, and everything here is an
exact operation (maximum, comparison, power-of-two product) or one correct rounding, so rows do not
depend on the batch: the oracles are exact forms too.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import torch

from sglang_k3.kernels import registry

BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0 = (*(math.ldexp(1.0, byte - 127) for byte in range(255)), math.nan)

# A value above a midpoint takes the upper code; a midpoint itself goes to the code with an even
# mantissa, so for every second midpoint "above" includes it.
_MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(E2M1))


@registry.register("mx.quantize_mxfp4", "reference", preference=0, exact=True, device="any")
def quantize_mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """w [R, C] -> packed u8 [R, C/2], scale u8 [R, C/32]; round to nearest, ties to even.

    The scale is the largest magnitude's power of two over 4, the next power where that magnitude would
    be 7 or more and clip: what compressed-tensors writes. A block of zeros has scale byte 0. Raises
    ValueError unless C is a multiple of 32 and every value is finite.
    """
    blocks = _blocks(w)
    if not torch.isfinite(blocks).all():
        raise ValueError("a weight that is not finite has no MXFP4 form")
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1))  # mantissa in [0.5, 1), or 0
    power = exponent - 1 + (mantissa >= 0.875).int()
    scale = torch.where(mantissa == 0, 0, power - 2 + 127).clamp(0, 254).to(torch.uint8)
    scaled = (blocks.double() / scale_values(scale).unsqueeze(-1).double()).flatten(1)
    magnitude = scaled.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for index, midpoint in enumerate(_MIDPOINTS):
        code += (magnitude >= midpoint) if index % 2 else (magnitude > midpoint)
    code += torch.signbit(scaled).to(torch.uint8) * 8
    return code[:, 0::2] | (code[:, 1::2] << 4), scale


@registry.register("mx.dequantize_mxfp4", "reference", preference=0, exact=True, device="any")
def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """packed u8 [R, C/2], scale u8 [R, C/32] -> [R, C] in dtype. Exact in fp32 and bf16."""
    table, _ = _tables(packed.device)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    blocks = table[codes.int()].unflatten(1, (scale.shape[1], BLOCK))
    return (blocks * scale_values(scale).unsqueeze(-1)).flatten(1).to(dtype)


@registry.register("mx.quantize_mxfp8", "reference", preference=0, exact=True, device="any")
def quantize_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, C] -> float8_e4m3fn [T, C], scale u8 [T, C/32], by the rule that never saturates.

    The scale is the smallest power of two that brings the block's largest magnitude (at least 1e-10)
    to 448 or less; elements are rounded to nearest, ties to even. A block with NaN or an infinity gets
    scale byte 255 and zero elements, so it reads back as NaN. Raises ValueError unless C is a multiple
    of 32.
    """
    blocks = _blocks(x)
    largest = blocks.abs().amax(-1)
    finite = torch.isfinite(largest)
    ratio = torch.where(finite, largest, 1.0).clamp_min(1e-10) / 448.0
    mantissa, exponent = torch.frexp(ratio)  # mantissa in [0.5, 1): 0.5 is a power of two itself
    scale = exponent - (mantissa == 0.5).int() + 127
    step = scale_values(scale.to(torch.uint8)).unsqueeze(-1)
    q = torch.where(finite.unsqueeze(-1), blocks, 0.0).div(step).clamp(-448.0, 448.0)
    scale = torch.where(finite, scale, 255).to(torch.uint8)
    return q.flatten(1).to(torch.float8_e4m3fn), scale


@registry.register("mx.dequantize_mxfp8", "reference", preference=0, exact=True, device="any")
def dequantize_mxfp8(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """q float8_e4m3fn [T, C], scale u8 [T, C/32] -> [T, C] in dtype."""
    blocks = q.float().unflatten(1, (scale.shape[1], BLOCK))
    return (blocks * scale_values(scale).unsqueeze(-1)).flatten(1).to(dtype)


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes u8 [...] -> fp32 [...]: 2^(byte - 127), NaN for 255."""
    return _tables(scale.device)[1][scale.int()]


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What each E2M1 code and each E8M0 byte stands for, fp32; sent to a device once, since sending waits."""
    elements = [*E2M1, *(-value for value in E2M1)]
    return torch.tensor(elements, device=device), torch.tensor(E8M0, dtype=torch.float32, device=device)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[R, C] -> fp32 [R, C/32, 32]. Raises ValueError where C is not a multiple of 32."""
    if x.dim() != 2 or x.shape[1] % BLOCK:
        raise ValueError(
            f"an MX matrix needs two axes and columns in blocks of {BLOCK}, not {tuple(x.shape)}"
        )
    return x.float().unflatten(1, (x.shape[1] // BLOCK, BLOCK))
