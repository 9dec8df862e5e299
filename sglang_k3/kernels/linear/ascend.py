"""Linear maps on an Ascend NPU: torch's products, which torch_npu hands to the cube units."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_k3.kernels.ascend import DEVICE
from sglang_k3.kernels.registry import register


@register("linear", "npu torch", preference=10, device=DEVICE)
def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `reference.linear`."""
    return F.linear(x, weight.to(x.dtype))


@register("linear_batched", "npu torch", preference=10, device=DEVICE)
def linear_batched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `reference.linear_batched`."""
    return (x.transpose(0, 1) @ weight.to(x.dtype).transpose(1, 2)).transpose(0, 1)
