"""Gated activations on an Ascend NPU, with the config's betas.

sgl_kernel_npu has two forms of SiTU. The one that SGLang's dense layers call, situ_and_mul, takes no betas
and computes with constants of its own: it is registered to say so where somebody looks for it, and takes no
call. The other, situ, takes both.
"""

from __future__ import annotations

import torch

from sglang_k3.kernels.activation import reference
from sglang_k3.kernels.ascend import DEVICE, absent, mx_refusal, operators, package_function
from sglang_k3.kernels.registry import Call, register

_SITU = "sgl_kernel_npu.activation.situ", "situ"


def _no_betas(call: Call) -> str | None:
    return "it has no argument for the config's beta and linear_beta (4 and 25 in Kimi K3)"


@register("activation.gated", "sgl_kernel_npu situ_and_mul", preference=30, device=DEVICE, supports=_no_betas)
def situ_and_mul(gate_up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """Never chosen. Raises RuntimeError."""
    raise RuntimeError(_no_betas(Call(DEVICE, gate_up.dtype)))


def _situ_supports(call: Call) -> str | None:
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 or float16, not {call.dtype}"
    return None if package_function(*_SITU) is not None else absent("sgl_kernel_npu", "situ")


@register("activation.gated", "sgl_kernel_npu situ", preference=20, device=DEVICE, supports=_situ_supports)
def situ(gate_up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """See `reference.gated`; a SiLU gate, which has no beta, is torch_npu's."""
    if beta is None:
        return gated(gate_up, beta, linear_beta)
    kernel = package_function(*_SITU)
    assert kernel is not None
    return kernel(_even(gate_up), need_quant=False, beta=beta, linear_beta=linear_beta)[0]


@register("activation.gated", "torch_npu npu_swiglu, SiTU in torch", preference=10, device=DEVICE)
def gated(gate_up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """See `reference.gated`."""
    if beta is not None:
        return reference.gated(gate_up, beta, linear_beta)
    return operators().npu_swiglu(_even(gate_up), -1)


def _even(gate_up: torch.Tensor) -> torch.Tensor:
    """Raises ValueError for columns that are not a gate and as many ups."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gated: {gate_up.shape[-1]} columns are not a gate and as many ups")
    return gate_up


register("activation.gated_int8", "npu torch", preference=10, device=DEVICE)(reference.gated_int8)
register(
    "activation.gated_mxfp8",
    "npu torch",
    preference=10,
    device=DEVICE,
    supports=lambda call: mx_refusal("MXFP8"),
)(reference.gated_mxfp8)
