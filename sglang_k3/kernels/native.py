"""What this CPU's own instructions can do, as far as a choice of kernels depends on it."""

from __future__ import annotations

from functools import cache

import torch


@cache
def narrow_vectors() -> bool:
    """Whether the CPU has vectors of at most 256 bits. Matrix products gain from wider ones, and the
    kernels that spell out their sums in eight lanes do not."""
    return torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


@cache
def native_bf16() -> bool:
    """Whether the CPU has instructions for products of bfloat16 (AVX-512 BF16, AMX, or Arm's).

    Without them torch's bf16 product of 64 rows takes four times as long as its fp32 product.
    """
    if "arm" in torch.backends.cpu.get_cpu_capability().lower():
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
