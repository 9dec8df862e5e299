"""Launch of gated_rms_norm/triton.py as a torch operator that graphs take. Not run on hardware."""

from __future__ import annotations

import torch

from sglang_k3.kernels.ascend import DEVICE
from sglang_k3.kernels.registry import register
from sglang_k3.kernels.triton_targets import NAME, PREFERENCE, holding, refusal, start

_ROWS = 16
"""Heads' rows an item: as many as still leave work for every core at 16 requests of 6 heads and 8 rows."""


@register("gated_rms_norm", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
@torch.library.custom_op("sglang_k3::gated_rms_norm", mutates_args=())
def gated_rms_norm(o: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `reference.gated_rms_norm`."""
    from sglang_k3.kernels.gated_rms_norm import triton as kernels

    tokens, heads, width = o.shape
    out = gate.new_empty(gate.shape)
    rows = tokens * heads
    if items := -(-rows // _ROWS):
        start(kernels.gated_rms_norm, items)(
            o.contiguous(),
            gate.contiguous(),
            weight,
            out,
            eps,
            items,
            rows,
            V=width,
            BV=holding(width),
            BR=_ROWS,
        )
    return out


@torch.library.register_fake("sglang_k3::gated_rms_norm")
def _(o, gate, weight, eps) -> torch.Tensor:
    return gate.new_empty(gate.shape)
