"""How far a chain of drafts agrees with what the target chose: the oracle."""

from __future__ import annotations

import torch

from sglang_k3.kernels.registry import register


@register("acceptance.chain", "reference", preference=0, exact=True, device="any")
def chain(candidates: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """candidates [N, D] int64: anchor and drafts; chosen [N, D] int64: what the target chose behind each of
    them. -> counts [N] int64, 1..D: drafts before the first that differs, and one more token."""
    agrees = candidates[:, 1:] == chosen[:, :-1]
    return agrees.long().cumprod(1).sum(1) + 1
