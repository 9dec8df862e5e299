"""Routed experts on a CPU: the tokens of one expert at a time, only experts that have any.

The exact forms put each expert's rows through the exact linear map, whose rows do not depend on how many
there are, and add a token's experts in ascending id order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_k3.kernels import registry
from sglang_k3.kernels.activation.cpu import gated
from sglang_k3.kernels.linear.cpu import linear, linear_by_rows, linear_row_dots
from sglang_k3.kernels.moe import cpu_router, packed_cpu  # noqa: F401  (register moe.route and packed experts)
from sglang_k3.kernels.mx.cpu import dequantize_mxfp4
from sglang_k3.kernels.native import native_bf16
from sglang_k3.kernels.row_math import fp32_only, fp32_or_bf16
from sglang_k3.kernels.split import threads_for

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ExpertWeights = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


@registry.register("moe.experts", "by_expert", preference=10, supports=fp32_or_bf16)
def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    beta: float | None,
    linear_beta: float | None,
    first_expert: int = 0,
) -> torch.Tensor:
    """Arguments and result as the reference; products and activation in x's dtype, the sum in fp32."""
    return _experts(_product(x.dtype), x, ids, weights, w13, w2, beta, linear_beta, first_expert)


@registry.register("moe.experts", "row_dots", preference=5, exact=True, supports=fp32_only)
def experts_row_dots(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    beta: float | None,
    linear_beta: float | None,
    first_expert: int = 0,
) -> torch.Tensor:
    """Arguments and result as the reference, all fp32."""
    return _experts(linear_row_dots, x, ids, weights, w13, w2, beta, linear_beta, first_expert)


@registry.register("moe.experts_mxfp4", "by_expert", preference=10, supports=fp32_or_bf16)
def experts_mxfp4(
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
    """Arguments and result as the reference; a touched expert is unpacked to x's dtype, used, dropped."""

    def unpack(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            dequantize_mxfp4(w13_packed[expert], w13_scale[expert], x.dtype),
            dequantize_mxfp4(w2_packed[expert], w2_scale[expert], x.dtype),
        )

    local, count = ids - first_expert, w13_packed.shape[0]
    return _sum(_product(x.dtype), x, local, weights, count, unpack, beta, linear_beta)


def _experts(
    linear: Linear,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    beta: float | None,
    linear_beta: float | None,
    first_expert: int,
) -> torch.Tensor:
    local = ids - first_expert
    return _sum(linear, x, local, weights, w13.shape[0], lambda e: (w13[e], w2[e]), beta, linear_beta)


def _product(dtype: torch.dtype) -> Linear:
    return linear if dtype == torch.bfloat16 and native_bf16() else linear_by_rows


def _sum(
    linear: Linear,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    expert_weights: ExpertWeights,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    """Sum over the experts 0 .. experts - 1 found in ids [T, k]; other ids add nothing."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    chosen, order = torch.sort(ids.flatten(), stable=True)
    tokens = order // max(ids.shape[1], 1)
    shares = weights.flatten()[order].float()
    found, counts = torch.unique_consecutive(chosen, return_counts=True)
    end = 0
    for expert, count in zip(found.tolist(), counts.tolist(), strict=True):
        start, end = end, end + count
        if not 0 <= expert < experts:
            continue
        rows = tokens[start:end]
        w13, w2 = expert_weights(expert)
        out = linear(gated(linear(x[rows], w13), beta, linear_beta), w2)
        with threads_for(2 * out.numel()):
            total.index_add_(0, rows, out.float() * shares[start:end].unsqueeze(1))
    return total.to(x.dtype)
