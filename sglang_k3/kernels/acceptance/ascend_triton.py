"""Launch of acceptance/triton.py as a torch operator that graphs take. Not run on hardware."""

from __future__ import annotations

import torch

from sglang_k3.kernels.acceptance import reference
from sglang_k3.kernels.ascend import DEVICE
from sglang_k3.kernels.registry import register
from sglang_k3.kernels.triton_targets import NAME, PREFERENCE, holding, refusal, start

_ROWS = 16

register("acceptance.chain", "npu torch", preference=10, device=DEVICE)(reference.chain)


@register("acceptance.chain", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
@torch.library.custom_op("sglang_k3::acceptance_chain", mutates_args=())
def chain(candidates: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """See `reference.chain`."""
    from sglang_k3.kernels.acceptance import triton as kernels

    rows, width = candidates.shape
    counts = candidates.new_empty(rows)
    if items := -(-rows // _ROWS):
        start(kernels.chain, items)(
            candidates.contiguous(),
            chosen.contiguous(),
            counts,
            items,
            rows,
            D=width,
            BD=holding(max(width, 2)),
            BR=_ROWS,
        )
    return counts


@torch.library.register_fake("sglang_k3::acceptance_chain")
def _(candidates, chosen) -> torch.Tensor:
    return candidates.new_empty(candidates.shape[0])
