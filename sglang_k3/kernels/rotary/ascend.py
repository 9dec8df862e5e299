"""Rotary embedding on an Ascend NPU, by torch_npu's operator."""

from __future__ import annotations

import torch

from sglang_k3.kernels.ascend import DEVICE, operators
from sglang_k3.kernels.registry import Call, register

_WIDEST, _MOST_HEADS = 894, 999


def _supports(call: Call) -> str | None:
    for name, most in (("width", _WIDEST), ("heads", _MOST_HEADS)):
        if (found := call.dims.get(name, 1)) > most:
            return f"npu_rotary_mul takes {name} up to {most}, not {found}"
    return None


@register("rotary", "torch_npu npu_rotary_mul", preference=10, device=DEVICE, supports=_supports)
def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `reference.rotary`; computed in float32. Raises ValueError for operands that do not fit."""
    tokens, _, width = x.shape
    if width % 2 or cos.shape != (tokens, width // 2) or sin.shape != cos.shape:
        raise ValueError(
            f"rotary: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} for heads {tuple(x.shape)}"
        )
    both = (torch.cat([part, part], dim=-1).view(1, tokens, 1, width) for part in (cos, sin))
    return operators().npu_rotary_mul(x.float().unsqueeze(0), *both, "half")[0].to(x.dtype)
