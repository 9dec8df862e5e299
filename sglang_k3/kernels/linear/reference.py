"""Oracle of the plain and the per-head linear map: the matrix product, computed wide."""

from __future__ import annotations

import torch

from sglang_k3.kernels import registry


@registry.register("linear", "reference", preference=0, device="any")
def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, In] times weight [Out, In] transposed -> [T, Out] in x's dtype; sums in fp32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) @ weight.to(wide).T).to(x.dtype)


@registry.register("linear_batched", "reference", preference=0, device="any")
def linear_batched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, In] times weight [H, In, Out], head by head -> [T, H, Out] in x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.einsum("thi,hoi->tho", x.to(wide), weight.to(wide)).to(x.dtype)
