"""Oracle of RMSNorm (arXiv 1910.07467), with the rounding order Kimi checkpoints were trained with."""

from __future__ import annotations

import torch

from sglang_k3.kernels import registry


@registry.register("rms_norm", "reference", preference=0, device="any")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, D], weight [D] -> [T, D] in x's dtype: x / sqrt(mean(x^2) + eps), rounded, times weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).to(x.dtype)
