"""Oracle of the gated activations of Kimi K3 (SiTU) and Kimi Linear (SiLU)."""

from __future__ import annotations

import torch

from sglang_k3.kernels import registry
from sglang_k3.kernels.mx.reference import quantize_mxfp8

SMALLEST = 1e-10
"""A row's largest magnitude counts as this much, as a block's does in MXFP8: zeros have a scale too."""


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


@registry.register("activation.gated_mxfp8", "reference", preference=0, device="any")
def gated_mxfp8(
    gate_up: torch.Tensor, beta: float | None, linear_beta: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated`, then `quantize_mxfp8`, with no rounding to gate_up's dtype between them: gate_up [T, 2I] ->
    float8_e4m3fn [T, I], scale u8 [T, I/32]. Raises ValueError unless I is a multiple of 32."""
    return quantize_mxfp8(gated(gate_up.float(), beta, linear_beta))


@registry.register("activation.gated_int8", "reference", preference=0, device="any")
def gated_int8(
    gate_up: torch.Tensor, beta: float | None, linear_beta: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated`, then one scale a token, with no rounding between: gate_up [T, 2I] -> int8 [T, I], fp32 [T].

    The scale is the row's largest magnitude (at least SMALLEST) over 127, as CANN's W8A8 products take it;
    elements are rounded to nearest, ties to even. A row with NaN or an infinity has the scale NaN and zeros.
    """
    return int8_rows(gated(gate_up.float(), beta, linear_beta))


def int8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [T, C] fp32 -> int8 [T, C] and the scale of each row, fp32 [T]; see `gated_int8`."""
    finite = torch.isfinite(rows).all(-1)
    rows = torch.where(finite.unsqueeze(-1), rows, 0.0)
    scale = rows.abs().amax(-1).clamp_min(SMALLEST) / 127.0
    codes = (rows / scale.unsqueeze(-1)).round().to(torch.int8)
    return codes, torch.where(finite, scale, torch.nan)
