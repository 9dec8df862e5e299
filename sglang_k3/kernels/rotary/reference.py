"""Oracle of the rotary embedding (arXiv 2104.09864) whose pairs are a head's two halves."""

from __future__ import annotations

import torch

from sglang_k3.kernels import registry


@registry.register("rotary", "reference", preference=0, exact=True, device="any")
def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, D], cos and sin [T, D/2] fp32 -> [T, H, D] in x's dtype; fp32 inside, one cast."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)
