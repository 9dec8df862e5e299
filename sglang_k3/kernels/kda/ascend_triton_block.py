"""Launch of kda/triton_block.py as a torch operator that graphs take. Not run on hardware."""

from __future__ import annotations

import torch

from sglang_k3.kernels.ascend import DEVICE
from sglang_k3.kernels.kda.ascend_triton import launch_verify
from sglang_k3.kernels.registry import register
from sglang_k3.kernels.triton_targets import NAME, PREFERENCE, holding, refusal

_HALF = 8
"""Rows of a draft in a cube unit's 16, the other half of which are their queries."""


def _at_least(least: int, rows: int) -> int:
    """The power of two that holds so many rows."""
    return max(least, holding(rows))


@register("kda.verify", f"{NAME}, products", preference=PREFERENCE - 1, device=DEVICE, supports=refusal)
@torch.library.custom_op(
    "sglang_k3::kda_verify_block", mutates_args=("state_pool", "bank_u", "bank_k", "bank_g")
)
def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    bank_rows: torch.Tensor,
    bank_u: torch.Tensor,
    bank_k: torch.Tensor,
    bank_g: torch.Tensor,
    starts: torch.Tensor,
    tails: torch.Tensor,
    fold_slots: torch.Tensor,
    scale: float,
    width: int | None = None,
) -> torch.Tensor:
    """See `reference.verify`, and `ascend_triton.verify` for width. A bf16 state is rounded where it is
    stored, not after every row."""
    from sglang_k3.kernels.kda import triton_block as kernels

    ring = bank_u.shape[1]
    width = ring if width is None else width
    half = _at_least(_HALF, width)
    return launch_verify(
        kernels.verify_block,
        (q, k, v, g, beta),
        state_pool,
        (slots, cu_seqlens, bank_rows),
        (bank_u, bank_k, bank_g),
        (starts, tails, fold_slots),
        scale,
        cube=True,
        WIDTH=width,
        HALF=half,
        LEVELS=half.bit_length() - 1,
        TAIL=_at_least(2 * _HALF, ring - width) if ring > width else 0,
    )


@torch.library.register_fake("sglang_k3::kda_verify_block")
def _(q, k, v, *rest) -> torch.Tensor:
    return v.new_empty(v.shape)
