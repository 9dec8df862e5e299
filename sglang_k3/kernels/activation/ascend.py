"""Gated activations on an Ascend NPU, with the config's betas.

sgl_kernel_npu's situ_and_mul takes no betas and computes with constants of its own: it is registered to
say so where somebody looks for it, and takes no call.
"""

from __future__ import annotations

import torch

from sglang_k3.kernels.activation import reference
from sglang_k3.kernels.ascend import DEVICE
from sglang_k3.kernels.registry import Call, register


def _no_betas(call: Call) -> str | None:
    return "it has no argument for the config's beta and linear_beta (4 and 25 in Kimi K3)"


@register("activation.gated", "sgl_kernel_npu situ_and_mul", preference=20, device=DEVICE, supports=_no_betas)
def situ_and_mul(gate_up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """Never chosen. Raises RuntimeError."""
    raise RuntimeError(_no_betas(Call(DEVICE, gate_up.dtype)))


register("activation.gated", "npu torch", preference=10, device=DEVICE)(reference.gated)
