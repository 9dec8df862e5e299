"""Launches of activation/triton.py as torch operators that graphs take. Not run on hardware."""

from __future__ import annotations

from typing import Any

import torch

from sglang_k3.kernels.ascend import DEVICE, mx_refusal
from sglang_k3.kernels.mx.reference import BLOCK as MX_BLOCK
from sglang_k3.kernels.registry import Call, register
from sglang_k3.kernels.triton_targets import NAME, PREFERENCE, holding, refusal, start

_BLOCK = 1024
_WIDEST = 4096
"""Columns of a row that has one scale: the chip holds it whole."""


def _mx_supports(call: Call) -> str | None:
    if call.dims.get("inner", MX_BLOCK) % MX_BLOCK:
        return f"inner {call.dims['inner']} is not a multiple of {MX_BLOCK}, a block of an MX format"
    return mx_refusal("MXFP8") or refusal(call)


def _int8_supports(call: Call) -> str | None:
    if (inner := call.dims.get("inner", 0)) > _WIDEST:
        return f"a row of {inner} columns does not fit the chip; it holds {_WIDEST}"
    return refusal(call)


def _arguments(
    gate_up: torch.Tensor, beta: float | None, linear_beta: float | None, items: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What follows the outputs of each kernel, and its constants but for the tile's size."""
    bounds = 1.0 if beta is None else beta, 1.0 if linear_beta is None else linear_beta
    clip = beta is not None
    constants = {"WIDTH": gate_up.shape[1] // 2, "CLIP": clip, "CLIP_UP": clip and linear_beta is not None}
    return (*bounds, items, gate_up.stride(0)), constants


@register("activation.gated", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
@torch.library.custom_op("sglang_k3::gated", mutates_args=())
def gated(gate_up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """See `reference.gated`."""
    from sglang_k3.kernels.activation import triton as kernels

    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = gate_up.new_empty(tokens, width)
    if items := tokens * -(-width // _BLOCK):
        numbers, constants = _arguments(gate_up, beta, linear_beta, items)
        start(kernels.gated, items)(gate_up, out, *numbers, BLOCK=_BLOCK, **constants)
    return out


@torch.library.register_fake("sglang_k3::gated")
def _(gate_up, beta, linear_beta) -> torch.Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@register("activation.gated_mxfp8", NAME, preference=PREFERENCE, device=DEVICE, supports=_mx_supports)
@torch.library.custom_op("sglang_k3::gated_mxfp8", mutates_args=())
def gated_mxfp8(
    gate_up: torch.Tensor, beta: float | None, linear_beta: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.gated_mxfp8`."""
    from sglang_k3.kernels.activation import triton as kernels

    codes, scales = _mxfp8_like(gate_up)
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    if items := len(codes) * -(-codes.shape[1] // _BLOCK):
        numbers, constants = _arguments(gate_up, beta, linear_beta, items)
        start(kernels.gated_mxfp8, items)(
            gate_up, codes.view(torch.int8), scales.view(torch.int8), *numbers, BLOCK=_BLOCK, **constants
        )
    return codes, scales


@torch.library.register_fake("sglang_k3::gated_mxfp8")
def _mxfp8_like(gate_up, *rest) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    if width % MX_BLOCK:
        raise ValueError(f"gated_mxfp8: {width} columns are not in blocks of {MX_BLOCK}")
    codes = gate_up.new_empty(tokens, width, dtype=torch.float8_e4m3fn)
    return codes, gate_up.new_empty(tokens, width // MX_BLOCK, dtype=torch.uint8)


@register("activation.gated_int8", NAME, preference=PREFERENCE, device=DEVICE, supports=_int8_supports)
@torch.library.custom_op("sglang_k3::gated_int8", mutates_args=())
def gated_int8(
    gate_up: torch.Tensor, beta: float | None, linear_beta: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.gated_int8`. Raises ValueError for a row that the chip does not hold."""
    from sglang_k3.kernels.activation import triton as kernels

    codes, scales = _int8_like(gate_up)
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    if items := len(codes):
        numbers, constants = _arguments(gate_up, beta, linear_beta, items)
        tile = holding(codes.shape[1])
        start(kernels.gated_int8, items)(gate_up, codes, scales, *numbers, BW=tile, **constants)
    return codes, scales


@torch.library.register_fake("sglang_k3::gated_int8")
def _int8_like(gate_up, *rest) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    if width > _WIDEST:
        raise ValueError(f"gated_int8: a row of {width} columns does not fit the chip; it holds {_WIDEST}")
    codes = gate_up.new_empty(tokens, width, dtype=torch.int8)
    return codes, gate_up.new_empty(tokens, dtype=torch.float32)
