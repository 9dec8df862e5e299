"""RMSNorm on an Ascend NPU, by torch_npu's operator."""

from __future__ import annotations

import torch

from sglang_k3.kernels.ascend import DEVICE, operators
from sglang_k3.kernels.registry import register


@register("rms_norm", "torch_npu npu_rms_norm", preference=10, device=DEVICE)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `reference.rms_norm`. Raises ValueError for a weight that does not fit."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight {tuple(weight.shape)} for rows of {x.shape[-1]}")
    return operators().npu_rms_norm(x, weight.to(x.dtype), eps)[0]
