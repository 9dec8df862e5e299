"""What torch_npu's own operators compute, for the emulated device: CPU tensors in, CPU tensors out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

REFERENCES: dict[str, Callable[..., Any]] = {}


def reference(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Of the operator npu::name, arguments as in its schema."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        REFERENCES[name] = function
        return function

    return add


@reference("npu_format_cast")
@reference("npu_format_cast.aclnn")
def format_cast(tensor: torch.Tensor, acl_format: int, **rest: Any) -> torch.Tensor:
    """Layouts in memory are not emulated: the same values."""
    return tensor.clone()


@reference("npu_rms_norm")
def rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, ...]:
    wide = input.float()
    scale = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return ((wide * scale).to(input.dtype) * gamma).to(input.dtype), scale


@reference("npu_scatter_nd_update_")
def scatter_nd_update_(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """Rows of the first axes that each index names."""
    input[tuple(indices.long().unbind(-1))] = updates
    return input


@reference("npu_moe_gating_top_k")
def moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    **rest: Any,
) -> tuple[torch.Tensor, ...]:
    """norm_type 0 softmax, 1 sigmoid; chosen by biased score in descending order, weighted by the score.

    A sigmoid's weights are divided by their sum, as CANN's documentation of renorm 0 has it.
    """
    assert renorm == 0 and not out_flag
    scores = x.sigmoid() if norm_type else x.softmax(-1)
    choice = scores if bias is None else scores + bias
    if group_count > 1:
        grouped = choice.unflatten(-1, (group_count, -1))
        worth = grouped.topk(2 if group_select_mode else 1, dim=-1).values.sum(-1)
        kept = torch.zeros_like(worth, dtype=torch.bool)
        kept.scatter_(1, worth.topk(k_group, dim=-1).indices, True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, ids)
    if norm_type:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return weights * routed_scaling_factor, ids.to(torch.int32), torch.zeros_like(x)


@reference("npu_moe_init_routing_v2")
def moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    active_num: int = -1,
    expert_num: int = -1,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | None = None,
    row_idx_type: int = 0,
    **rest: Any,
) -> tuple[torch.Tensor, ...]:
    """Rows of x sorted by expert; where each (token, choice) went; tokens of each expert."""
    assert quant_mode == -1 and row_idx_type == 0 and expert_tokens_num_type == 1 and expert_tokens_num_flag
    first, last = active_expert_range or [0, expert_num]
    assert (first, last) == (0, expert_num)
    flat = expert_idx.flatten().long()
    order = flat.sort(stable=True).indices
    where = torch.empty_like(order)
    where[order] = torch.arange(len(order))
    counts = torch.bincount(flat, minlength=expert_num)
    return x[order // expert_idx.shape[1]], where.to(torch.int32), counts, torch.empty(0)


@reference("npu_grouped_matmul")
def grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    group_list: torch.Tensor,
    group_type: int,
    group_list_type: int,
    split_item: int,
    **rest: Any,
) -> list[torch.Tensor]:
    """One x and one weight [E, C, R]: rows of each expert, by counts, times its matrix; sums in fp32."""
    assert len(x) == len(weight) == 1 and group_type == 0 and group_list_type == 1 and split_item == 3
    assert not any(value is not None for value in rest.values() if isinstance(value, list))
    (rows,), (matrices,) = x, weight
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    ends = group_list.cumsum(0).tolist()
    for expert, end in enumerate(ends):
        begin = ends[expert - 1] if expert else 0
        out[begin:end] = (rows[begin:end].float() @ matrices[expert].float()).to(rows.dtype)
    return [out]
