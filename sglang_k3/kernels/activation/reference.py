"""Oracle of the gated activations of Kimi K3 (SiTU) and Kimi Linear (SiLU)."""

from __future__ import annotations

import torch

from sglang_k3.kernels import registry


@registry.register("activation.gated", "reference", preference=0, device="any")
def gated(gate_up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """gate_up [T, 2I] = [gate | up] -> [T, I] in its dtype; fp32 or wider inside, one cast.

    SiTU: beta tanh(gate / beta) sigmoid(gate) times linear_beta tanh(up / linear_beta); the sigmoid
    takes the raw gate, and `up` is left as it is when linear_beta is None. With beta None it is
    silu(gate) * up and linear_beta has no part in it.
    """
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    if beta is None:
        return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up).to(gate_up.dtype)
