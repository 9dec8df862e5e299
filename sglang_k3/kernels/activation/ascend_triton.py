"""Launch of activation/triton.py as a torch operator that graphs take. Not run on hardware."""

from __future__ import annotations

import torch

from sglang_k3.kernels.ascend import DEVICE
from sglang_k3.kernels.registry import register
from sglang_k3.kernels.triton_targets import NAME, PREFERENCE, refusal, start

_BLOCK = 1024


@register("activation.gated", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
@torch.library.custom_op("sglang_k3::gated", mutates_args=())
def gated(gate_up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """See `reference.gated`."""
    from sglang_k3.kernels.activation import triton as kernels

    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = gate_up.new_empty(tokens, width)
    if items := tokens * -(-width // _BLOCK):
        start(kernels.gated, items)(
            gate_up,
            out,
            1.0 if beta is None else beta,
            1.0 if linear_beta is None else linear_beta,
            items,
            gate_up.stride(0),
            WIDTH=width,
            BLOCK=_BLOCK,
            CLIP=beta is not None,
            CLIP_UP=beta is not None and linear_beta is not None,
        )
    return out


@torch.library.register_fake("sglang_k3::gated")
def _(gate_up, beta, linear_beta) -> torch.Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
