"""Router and routed experts on an Ascend NPU, by torch_npu's operators.

Their meta kernels let almost anything pass, and what they compute then is anybody's guess, so every call
is checked here first.
"""

from __future__ import annotations

import torch

from sglang_k3.kernels.activation.ascend import gated
from sglang_k3.kernels.ascend import DEVICE, operators
from sglang_k3.kernels.moe.reference import check_route
from sglang_k3.kernels.registry import Call, register

_SIGMOID, _SOFTMAX = 1, 0
PER_EXPERT_COUNTS, M_AXIS, ONE_TENSOR = 1, 0, 3
"""group_list_type, group_type and split_item of npu_grouped_matmul, in SGLang's own choice."""
_MOST_EXPERTS = 2048


def _route_supports(call: Call) -> str | None:
    experts = call.dims.get("experts", 1)
    if experts > _MOST_EXPERTS:
        return f"npu_moe_gating_top_k takes at most {_MOST_EXPERTS} experts, not {experts}"
    return None


@register(
    "moe.route", "torch_npu npu_moe_gating_top_k", preference=10, device=DEVICE, supports=_route_supports
)
def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    scaling: float,
    n_group: int,
    topk_group: int,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.route`. Which of two equal scores is taken is the operator's choice."""
    check_route(logits, top_k, n_group, topk_group, activation)
    if bias is not None and bias.shape != logits.shape[1:]:
        raise ValueError(f"route: a bias of {tuple(bias.shape)} for {logits.shape[1]} experts")
    weights, ids, _ = operators().npu_moe_gating_top_k(
        logits,
        top_k,
        bias=bias,
        k_group=topk_group,
        group_count=n_group,
        # A group is worth the sum of its two best scores where there is a bias, else its best one.
        group_select_mode=int(bias is not None),
        renorm=0,
        norm_type=_SIGMOID if activation == "sigmoid" else _SOFTMAX,
        out_flag=False,
        routed_scaling_factor=1.0,
        eps=1e-20,
    )
    ids, order = ids.long().sort(dim=-1)
    weights = weights.float().gather(1, order)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, ids


def check_choices(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Raises ValueError where ids and weights [T, k] do not belong to x [T, D]."""
    if x.dim() != 2 or ids.shape != weights.shape or ids.dim() != 2 or ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"experts: ids {tuple(ids.shape)} and weights {tuple(weights.shape)} for x {tuple(x.shape)}"
        )


def check_experts(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> None:
    """Raises ValueError where the dense matrices of `experts` do not fit together."""
    width = x.shape[1]
    count, rows, columns = w13.shape
    if columns != width or w2.shape != (count, width, rows // 2) or rows % 2:
        raise ValueError(
            f"experts: w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)} do not fit x {tuple(x.shape)}"
        )


def sort_by_expert(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, count: int, first_expert: int
) -> tuple[torch.Tensor, ...]:
    """Rows of x [T, D] by expert -> rows [T * k, D], where each (token, choice) went [T * k], rows of each of
    the `count` experts, and shares [T, k].

    Rows of experts elsewhere are computed with expert 0 and weigh nothing. Counts stay on the device.
    """
    local = ids - first_expert
    elsewhere = (local < 0) | (local >= count)
    chosen = local.masked_fill(elsewhere, 0).to(torch.int32)
    rows, row_index, counts, _ = operators().npu_moe_init_routing_v2(
        x,
        chosen,
        active_num=ids.numel(),
        expert_num=count,
        drop_pad_mode=0,
        expert_tokens_num_type=PER_EXPERT_COUNTS,
        expert_tokens_num_flag=True,
        active_expert_range=[0, count],
        quant_mode=-1,
        row_idx_type=0,
    )
    return rows, row_index, counts, weights.masked_fill(elsewhere, 0.0)


def combine(
    out: torch.Tensor, row_index: torch.Tensor, shares: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """out [T * k, D] back in the order of (token, choice), then each token's weighted sum, in fp32."""
    back = out[row_index.long()].view(*shares.shape, -1)
    return (back.float() * shares.unsqueeze(-1)).sum(1).to(dtype)


@register("moe.experts", "torch_npu npu_grouped_matmul", preference=10, device=DEVICE)
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
    """See `reference.experts`."""
    check_choices(x, ids, weights)
    check_experts(x, w13, w2)
    rows, row_index, counts, shares = sort_by_expert(x, ids, weights, w13.shape[0], first_expert)
    hidden = gated(_grouped(rows, w13, counts), beta, linear_beta)
    return combine(_grouped(hidden, w2, counts), row_index, shares, x.dtype)


def _grouped(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """rows [M, C], sorted by expert, times weight [E, R, C] transposed -> [M, R]."""
    if rows.shape[1] != weight.shape[2]:
        raise ValueError(f"experts: rows of {rows.shape[1]} for weights {tuple(weight.shape)}")
    return operators().npu_grouped_matmul(
        [rows],
        [weight.to(rows.dtype).transpose(1, 2)],
        group_list=counts,
        group_type=M_AXIS,
        group_list_type=PER_EXPERT_COUNTS,
        split_item=ONE_TENSOR,
    )[0]
