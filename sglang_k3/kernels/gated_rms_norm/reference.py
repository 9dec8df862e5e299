"""RMSNorm of each head's output, times a sigmoid gate: the oracle."""

from __future__ import annotations

import torch

from sglang_k3.kernels.registry import register


@register("gated_rms_norm", "reference", preference=0, device="any")
def gated_rms_norm(o: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """o / rms(o) * weight * sigmoid(gate), head by head.

    Args:
        o: [T, H, V], the attention output.
        gate: [T, H*V], the gate projection before its sigmoid.
        weight: [V] fp32, shared by the heads.
        eps: added to the mean square.

    Returns:
        [T, H*V] in gate's dtype; computed in fp32 (fp64 for fp64 o) with one cast at the end.
    """
    compute = torch.promote_types(o.dtype, torch.float32)
    x = o.to(compute)
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(compute)
    return (normed.flatten(1) * gate.to(compute).sigmoid()).to(gate.dtype)
