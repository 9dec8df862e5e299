"""Routed experts in MXFP4 on an Ascend 950: packed weights meet MXFP8 activations in torch_npu's products.

The layouts are those of SGLang's W4A8 method for the same operators (hardware_backend/npu/quantization/
moe_methods.py): weights [E, C/2, R] as a view of the checkpoint's [E, R, C/2], scales of weights
[E, C/64, R, 2], scales of activations [M, C/64, 2]. Left out is its x_dtype, a float8 that the tensor has
already and that torch_npu 2.13.0's meta kernel refuses.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from sglang_k3.kernels.activation.ascend import gated
from sglang_k3.kernels.ascend import DEVICE, mx_refusal, operators
from sglang_k3.kernels.moe.ascend import (
    M_AXIS,
    ONE_TENSOR,
    PER_EXPERT_COUNTS,
    check_choices,
    combine,
    experts,
    sort_by_expert,
)
from sglang_k3.kernels.mx.reference import BLOCK, dequantize_mxfp4
from sglang_k3.kernels.registry import Call, register

_PAIR = 2 * BLOCK
"""Columns that two neighbouring scales stand for, which CANN keeps side by side."""

_OCP_FLOOR = 0
"""npu_dynamic_mx_quant's scale_alg: the largest magnitude's power of two, and saturation above it."""


def _mx_supports(call: Call) -> str | None:
    return mx_refusal("MXFP4")


def _quantised_supports(call: Call) -> str | None:
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"its activations are MXFP8, too coarse for a model in {call.dtype}"
    for name in ("width", "inner"):
        if call.dims.get(name, _PAIR) % _PAIR:
            return f"{name} {call.dims[name]} is not a multiple of {_PAIR}, two blocks of an MX format"
    return _mx_supports(call)


def check_packed(x: torch.Tensor, name: str, packed: torch.Tensor, scale: torch.Tensor) -> None:
    """Raises ValueError where packed [E, R, C/2], scale [E, R, C/32] and x [.., C] do not fit together."""
    experts_, rows, halves = packed.shape
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"experts: {name} is {packed.dtype} with scales in {scale.dtype}, not uint8")
    if 2 * halves != x.shape[-1] or scale.shape != (experts_, rows, 2 * halves // BLOCK):
        raise ValueError(
            f"experts: {name} {tuple(packed.shape)} with scales {tuple(scale.shape)} does not fit rows of "
            f"{x.shape[-1]}"
        )


@register(
    "moe.experts_mxfp4",
    "torch_npu npu_dynamic_mx_quant, npu_grouped_matmul",
    preference=20,
    device=DEVICE,
    supports=_quantised_supports,
)
def experts_quantised(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13_packed: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_packed: torch.Tensor,
    w2_scale: torch.Tensor,
    beta: float | None,
    linear_beta: float | None,
    first_expert: int = 0,
) -> torch.Tensor:
    """See `reference.experts_mxfp4`, but for the activations: both products round their rows to MXFP8, as the
    checkpoint was trained for. Weights stay packed."""
    check_choices(x, ids, weights)
    check_packed(x, "w13", w13_packed, w13_scale)
    rows, row_index, counts, shares = sort_by_expert(x, ids, weights, w13_packed.shape[0], first_expert)
    hidden = gated(_product(rows, w13_packed, w13_scale, counts), beta, linear_beta)
    check_packed(hidden, "w2", w2_packed, w2_scale)
    out = _product(hidden, w2_packed, w2_scale, counts)
    return combine(out, row_index, shares, x.dtype)


def _product(
    rows: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """rows [M, C], sorted by expert, rounded to MXFP8, times packed [E, R, C/2] transposed -> [M, R]."""
    if rows.shape[1] % _PAIR:
        raise ValueError(f"experts: rows of {rows.shape[1]} are not in pairs of MX blocks ({_PAIR} columns)")
    torch_npu: Any = importlib.import_module("torch_npu")
    quantised, steps = operators().npu_dynamic_mx_quant(
        rows, axis=-1, round_mode="rint", dst_type=torch.float8_e4m3fn, block_size=BLOCK, scale_alg=_OCP_FLOOR
    )
    return operators().npu_grouped_matmul(
        [quantised],
        [packed.transpose(1, 2)],
        antiquant_scale=[scale.unflatten(2, (-1, 2)).transpose(1, 2)],
        per_token_scale=[steps],
        group_list=counts,
        group_type=M_AXIS,
        group_list_type=PER_EXPERT_COUNTS,
        split_item=ONE_TENSOR,
        output_dtype=rows.dtype,
        weight_dtype=torch_npu.float4_e2m1fn_x2,
        per_token_scale_dtype=torch_npu.float8_e8m0fnu,
    )[0]


@register(
    "moe.experts_mxfp4", "torch_npu, unpacked weights", preference=10, device=DEVICE, supports=_mx_supports
)
def experts_unpacked(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13_packed: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_packed: torch.Tensor,
    w2_scale: torch.Tensor,
    beta: float | None,
    linear_beta: float | None,
    first_expert: int = 0,
) -> torch.Tensor:
    """See `reference.experts_mxfp4`: weights are unpacked for the step, activations stay as they are.

    Exact in the weights and slow: all experts of this rank are unpacked. For float32, where MXFP8 activations
    would be the coarser part.
    """
    w13, w2 = (
        dequantize_mxfp4(packed.flatten(0, 1), scale.flatten(0, 1), x.dtype).unflatten(0, packed.shape[:2])
        for packed, scale in ((w13_packed, w13_scale), (w2_packed, w2_scale))
    )
    return experts(x, ids, weights, w13, w2, beta, linear_beta, first_expert)
