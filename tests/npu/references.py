"""What torch_npu's own operators compute, for the emulated device: CPU tensors in, CPU tensors out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_k3.kernels.mx.reference import dequantize_mxfp4, dequantize_mxfp8

FLOAT4, FLOAT8_E8M0 = 296, 293
"""torch_npu's numbers for formats that torch has no dtype for, or had none."""

DTYPES = {15: torch.bfloat16, 5: torch.float16, 6: torch.float32, 24: torch.float8_e4m3fn}
"""By torch's own numbers, which an operator's integer argument gets for a dtype."""

REFERENCES: dict[str, Callable[..., Any]] = {}


def reference(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Of the operator npu::name, arguments as in its schema."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        REFERENCES[name] = function
        return function

    return add


def _code(dtype: int | torch.dtype | None) -> int | None:
    return (
        next(number for number, one in DTYPES.items() if one is dtype)
        if isinstance(dtype, torch.dtype)
        else dtype
    )


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
    assert active_num == expert_idx.numel()
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
    antiquant_scale: list[torch.Tensor] | None = None,
    per_token_scale: list[torch.Tensor] | None = None,
    output_dtype: int | torch.dtype | None = None,
    weight_dtype: int | torch.dtype | None = None,
    per_token_scale_dtype: int | torch.dtype | None = None,
    **rest: Any,
) -> list[torch.Tensor]:
    """One x and one weight [E, C, R]: rows of each expert, by counts, times its matrix; sums in fp32.

    With antiquant_scale: x [M, C] in float8 with steps [M, C/64, 2], weight [E, C/2, R] in MXFP4 with steps
    [E, C/64, R, 2], both E8M0.
    """
    assert len(x) == len(weight) == 1 and group_type == 0 and group_list_type == 1 and split_item in (2, 3)
    assert not any(value is not None for value in rest.values() if isinstance(value, list))
    (rows,), (matrices,) = x, weight
    if antiquant_scale is None:
        assert per_token_scale is None and rows.dtype == matrices.dtype and rows.dtype.itemsize > 1
        dtype = rows.dtype
    else:
        assert per_token_scale is not None and len(antiquant_scale) == len(per_token_scale) == 1
        assert rows.dtype == torch.float8_e4m3fn and matrices.dtype == torch.uint8
        assert weight_dtype == FLOAT4 and per_token_scale_dtype == FLOAT8_E8M0
        code = _code(output_dtype)
        assert code is not None
        dtype = DTYPES[code]
        (steps,), (scales,) = per_token_scale, antiquant_scale
        experts, halves, outputs = matrices.shape
        assert steps.shape == (len(rows), halves // 32, 2) and scales.shape == (
            experts,
            halves // 32,
            outputs,
            2,
        )
        rows = dequantize_mxfp8(rows, steps.flatten(1), torch.float32)
        packed = matrices.transpose(1, 2).flatten(0, 1)
        flat = dequantize_mxfp4(packed, scales.transpose(1, 2).flatten(2).flatten(0, 1), torch.float32)
        matrices = flat.unflatten(0, (experts, outputs)).transpose(1, 2)
    assert rows.shape[1] == matrices.shape[1] and len(group_list) == matrices.shape[0]
    out = rows.new_zeros(rows.shape[0], matrices.shape[2], dtype=dtype)
    ends = group_list.cumsum(0).tolist()
    for expert, end in enumerate(ends):
        begin = ends[expert - 1] if expert else 0
        out[begin:end] = (rows[begin:end].float() @ matrices[expert].float()).to(dtype)
    return [out]


@reference("npu_dynamic_mx_quant")
def dynamic_mx_quant(
    input: torch.Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int | torch.dtype = FLOAT4,
    block_size: int = 32,
    scale_alg: int = 0,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """To float8_e4m3fn with E8M0 steps [M, C/64, 2], by the OCP rule: the largest magnitude's power of two
    over 2^8, and what is above the largest float8 saturates."""
    assert axis in (-1, input.dim() - 1) and input.dim() == 2 and round_mode == "rint"
    assert _code(dst_type) == _code(torch.float8_e4m3fn) and block_size == 32 and not scale_alg
    blocks = input.float().unflatten(1, (-1, 32))
    exponent = torch.frexp(blocks.abs().amax(-1)).exponent - 1 - 8
    steps = (exponent + 127).clamp(0, 254).to(torch.uint8)
    scaled = blocks / torch.exp2(steps.float() - 127).unsqueeze(-1)
    return scaled.clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn), steps.unflatten(1, (-1, 2))


@reference("npu_swiglu")
def swiglu(self: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = self.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(self.dtype)


@reference("npu_rotary_mul")
def rotary_mul(
    input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half", rotate: Any = None
) -> torch.Tensor:
    """r1 and r2 [1, S, 1, D] for input [1, S, N, D]."""
    assert rotary_mode == "half" and rotate is None and input.dim() == 4
    assert r1.shape == r2.shape == (1, input.shape[1], 1, input.shape[3])
    first, second = input.chunk(2, dim=-1)
    return input * r1 + torch.cat([-second, first], dim=-1) * r2


@reference("npu_fused_infer_attention_score_v2")
def fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor,
    key_rope: torch.Tensor,
    atten_mask: torch.Tensor,
    actual_seq_qlen: list[int],
    actual_seq_kvlen: list[int],
    block_table: torch.Tensor,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent form: query [B, N, S, L], query_rope [B, N, S, R]; key is value, pages [P, 1, block, L],
    key_rope [P, 1, block, R]; the last query of each request sees its last position.

    Rows past actual_seq_qlen come out as NaN: what a device leaves there nobody may read.
    """
    requests, heads, rows, latent = query.shape
    assert input_layout == "BNSD" and sparse_mode == 3 and num_key_value_heads == 1
    assert num_query_heads == heads and heads & (heads - 1) == 0
    assert query_rope.shape[:3] == query.shape[:3] and query_rope.shape[3] == key_rope.shape[3]
    assert key.shape == value.shape and key.data_ptr() == value.data_ptr()
    assert key.shape[1:] == (1, block_size, latent) and key_rope.shape[1:3] == (1, block_size)
    assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    assert len(actual_seq_qlen) == len(actual_seq_kvlen) == len(block_table) == requests
    assert all(tensor.is_contiguous() for tensor in (query, query_rope, key, key_rope, block_table))
    assert block_table.dtype == torch.int32
    out = torch.full_like(query, float("nan"))
    for n, (count, length) in enumerate(zip(actual_seq_qlen, actual_seq_kvlen, strict=True)):
        assert count <= rows and block_table.shape[1] * block_size >= length
        pages = block_table[n, : -(-length // block_size)].long()
        keys, ropes = (part[pages].flatten(0, 2)[:length].float() for part in (key, key_rope))
        scores = query[n, :, :count].float() @ keys.T + query_rope[n, :, :count].float() @ ropes.T
        last = torch.arange(length - count, length).unsqueeze(1)
        hidden = torch.arange(length) > last
        share = (scores * softmax_scale).masked_fill(hidden, float("-inf")).softmax(-1)
        out[n, :, :count] = (share @ keys).to(query.dtype)
    return out, torch.empty(1)
