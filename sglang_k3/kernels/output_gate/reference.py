"""Oracle of MLA's output gate."""

from __future__ import annotations

import torch

from sglang_k3.kernels import registry


@registry.register("output_gate", "reference", preference=0, device="any")
def output_gate(o: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """o [T, C], gate [T, C] -> o * sigmoid(gate) [T, C] in o's dtype; one rounding, at the end."""
    wide = torch.promote_types(o.dtype, torch.float32)
    return (o.to(wide) * torch.sigmoid(gate.to(wide))).to(o.dtype)
