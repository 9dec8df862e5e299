"""Operators of packages that an Ascend host may have and no index serves: sgl_kernel_npu, CANN's own.

Schemas are those that the packages declare (sgl-kernel-npu's csrc/pytorch_extensions.cpp; the operators'
documents of ops-transformer and cannbot-dsl); what they compute is written from their documents. So a call
that fits here fits what is written there, which nobody has compared with an installed package.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from sglang_k3.kernels.activation.reference import gated
from tests.npu.emulator import Emulator
from tests.npu.references import reference

COMMIT = "commit_recurrent_kda_replayssm"
OPERATORS: tuple[tuple[str, str], ...] = (
    (
        "npu",
        "causal_conv1d(Tensor x, Tensor weight, Tensor(a!) conv_states, Tensor? bias=None, "
        "Tensor? query_start_loc=None, Tensor? cache_indices=None, Tensor? has_initial_state=None, "
        "Tensor? num_accepted_tokens=None, int activation_mode=0, int pad_slot_id=-1, int run_mode=0) "
        "-> Tensor",
    ),
    (
        "cann_ops_transformer",
        "flash_mla_with_kvcache_metadata(Tensor cache_seqlens, int num_heads_q, int num_heads_kv, "
        "Tensor? cu_seqlens_q=None, Tensor? seqused_q=None, int? max_seqlen_q=None, int? max_seqlen_kv=None, "
        'int head_dim_qk=576, int head_dim_v=512, int? mask_mode=None, str layout_q="BSND") -> Tensor',
    ),
    (
        "cann_ops_transformer",
        "flash_mla_with_kvcache(Tensor q, Tensor k_cache, Tensor? block_table=None, "
        "Tensor? cache_seqlens=None, Tensor? cu_seqlens_q=None, Tensor? seqused_q=None, "
        "Tensor? attn_mask=None, Tensor? metadata=None, int head_dim_v=512, float softmax_scale=1.0, "
        "int mask_mode=0, int max_seqlen_q=-1, int max_seqlen_kv=-1, str layout_q='BSND', "
        "str layout_kv='PA_BBND', str layout_out='BSND', bool return_softmax_lse=False) -> (Tensor, Tensor)",
    ),
    (
        f"cannbotdsl_{COMMIT}",
        f"{COMMIT}(Tensor(a!) recurrent_state, Tensor replay_u, Tensor replay_k, Tensor replay_decay, "
        "Tensor num_accepted_tokens, int? block_num=None) -> ()",
    ),
)


def _same_shape(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _plan_shape(cache_seqlens: torch.Tensor, *rest: Any) -> torch.Tensor:
    return cache_seqlens.new_empty(8, dtype=torch.int32)


def _attention_shape(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape[1], q.shape[0], 512), q.new_empty(0, dtype=torch.float32)


def _nothing(*given: Any) -> None:
    return None


@reference("causal_conv1d")
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_states: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    activation_mode: int = 0,
    pad_slot_id: int = -1,
    run_mode: int = 0,
    **rest: Any,
) -> torch.Tensor:
    """One row a request: weight [width, channels], windows [slots, width - 1, channels], which move on."""
    assert run_mode == 1 and activation_mode == 1 and weight.dtype == x.dtype == conv_states.dtype
    assert query_start_loc.tolist() == list(range(len(x) + 1)) and query_start_loc.dtype == torch.int32
    assert cache_indices.dtype == torch.int32 and len(cache_indices) == len(x)
    assert weight.shape == (conv_states.shape[1] + 1, x.shape[1])
    y = torch.full_like(x, float("nan"))
    for row, slot in enumerate(cache_indices.tolist()):
        if slot != pad_slot_id:
            window = torch.cat([conv_states[slot], x[row : row + 1]])
            y[row] = torch.nn.functional.silu((window.float() * weight.float()).sum(0)).to(x.dtype)
            conv_states[slot] = window[1:]
    return y


@reference("cann_ops_transformer::flash_mla_with_kvcache_metadata")
def flash_mla_plan(
    cache_seqlens: torch.Tensor,
    num_heads_q: int,
    num_heads_kv: int,
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_q: torch.Tensor | None = None,
    head_dim_qk: int = 576,
    head_dim_v: int = 512,
    mask_mode: int | None = None,
    layout_q: str = "BSND",
    **rest: Any,
) -> torch.Tensor:
    """A plan that knows for which call it was made; the real one's insides are CANN's."""
    assert num_heads_q in (64, 96) and num_heads_kv == 1 and layout_q == "TND" and mask_mode == 3
    assert (head_dim_qk, head_dim_v) == (576, 512) and seqused_q is not None
    return _fingerprint(cache_seqlens, cu_seqlens_q, seqused_q, num_heads_q)


def _fingerprint(positions: Any, bounds: Any, used: Any, heads: int) -> torch.Tensor:
    assert positions.dtype == bounds.dtype == used.dtype == torch.int32
    weights = torch.arange(1, len(positions) + 1, dtype=torch.int32)
    sums = [(weights * positions).sum(), bounds.sum(), (weights * used).sum(), torch.tensor(heads)]
    return torch.stack([*sums, *[torch.tensor(0)] * 4]).to(torch.int32)


@reference("cann_ops_transformer::flash_mla_with_kvcache")
def flash_mla(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_q: torch.Tensor,
    attn_mask: torch.Tensor,
    metadata: torch.Tensor,
    head_dim_v: int = 512,
    softmax_scale: float = 1.0,
    mask_mode: int = 0,
    layout_q: str = "BSND",
    layout_kv: str = "PA_BBND",
    layout_out: str = "BSND",
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, 576], k_cache [pages, 128, 1, 576] -> [H, T, 512]; a request's last row sees all of it."""
    tokens, heads, width = q.shape
    assert (layout_q, layout_kv, layout_out, mask_mode) == ("TND", "PA_BBND", "NTD", 3)
    assert k_cache.shape[1:] == (128, 1, width) and (width, head_dim_v) == (576, 512)
    assert torch.equal(attn_mask, torch.ones(2048, 2048, dtype=torch.int8).triu(1))
    assert torch.equal(metadata, _fingerprint(cache_seqlens, cu_seqlens_q, seqused_q, heads))
    assert cu_seqlens_q[0] == 0 and cu_seqlens_q[-1] == tokens and block_table.dtype == torch.int32
    out = q.new_full((heads, tokens, head_dim_v), float("nan"))
    for n, (begin, count, length) in enumerate(
        zip(cu_seqlens_q.tolist(), seqused_q.tolist(), cache_seqlens.tolist(), strict=False)
    ):
        pages = block_table[n, : -(-length // 128)].long()
        keys = k_cache[pages].flatten(0, 2)[:length].float()
        scores = softmax_scale * q[begin : begin + count].transpose(0, 1).float() @ keys.T
        hidden = torch.arange(length) > torch.arange(length - count, length).unsqueeze(1)
        share = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[:, begin : begin + count] = (share @ keys[:, :head_dim_v]).to(q.dtype)
    return out, torch.empty(0)


@reference(f"cannbotdsl_{COMMIT}::{COMMIT}")
def commit(
    recurrent_state: torch.Tensor,
    replay_u: torch.Tensor,
    replay_k: torch.Tensor,
    replay_decay: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    block_num: int | None = None,
) -> None:
    """State [B, N, D, D] in place: each accepted row decays its key columns, then adds u k^T."""
    requests, heads, size, _ = recurrent_state.shape
    assert recurrent_state.dtype == replay_decay.dtype == torch.float32 and size == 128
    assert replay_u.dtype == replay_k.dtype == torch.float16
    assert num_accepted_tokens.shape == (requests,) and num_accepted_tokens.dtype == torch.int32
    assert replay_u.shape == replay_k.shape == replay_decay.shape
    assert (replay_u.shape[0], *replay_u.shape[2:]) == (requests, heads, size)
    for n, count in enumerate(num_accepted_tokens.tolist()):
        for row in range(count):
            decayed = recurrent_state[n] * replay_decay[n, row].unsqueeze(1)
            u, k = replay_u[n, row].float(), replay_k[n, row].float()
            recurrent_state[n] = decayed + u.unsqueeze(2) * k.unsqueeze(1)


def situ(
    hidden_states: torch.Tensor,
    group_list: torch.Tensor | None = None,
    group_list_type: int | None = None,
    *,
    need_quant: bool,
    beta: float = 4.0,
    linear_beta: float | None = 25.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """sgl_kernel_npu.activation.situ's, for dense rows."""
    assert group_list is None and group_list_type is None and not need_quant
    return gated(hidden_states, beta, linear_beta), None


def fused_kda_gate_npu(
    gate: torch.Tensor,
    A_log: torch.Tensor,
    head_dim: int,
    *,
    gate_bias: torch.Tensor | None = None,
    beta: float = 1.0,
    threshold: float = 20.0,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """sgl_kernel_npu.fla.kda_gate's: log decay, in float32 and gate's shape."""
    if A_log.numel() * head_dim != gate.shape[-1] or (
        gate_bias is not None and gate_bias.numel() != gate.shape[-1]
    ):
        raise ValueError("KDA gate shape does not match A_log and head_dim")
    raw = gate.float() if gate_bias is None else gate.float() + gate_bias
    raw = raw.unflatten(-1, (-1, head_dim))
    rate = A_log.exp().unsqueeze(-1)
    if lower_bound is None:
        return (-rate * torch.nn.functional.softplus(raw, beta, threshold)).flatten(-2)
    return (lower_bound * (rate * raw).sigmoid()).flatten(-2)


def install(emulator: Emulator) -> None:
    """Once a process, before our implementations ask whether the packages are there."""
    shapes = (_same_shape, _plan_shape, _attention_shape, _nothing)
    for (namespace, schema), meta in zip(OPERATORS, shapes, strict=True):
        emulator.provide(namespace, schema, meta)
    for package in ("cann_ops_transformer", COMMIT):
        sys.modules[package] = ModuleType(package)
    import sgl_kernel_npu.activation.situ as activation  # type: ignore[import-not-found]
    import sgl_kernel_npu.fla.kda_gate as kda_gate  # type: ignore[import-not-found]

    setattr(activation, "situ", situ)  # noqa: B010
    setattr(kda_gate, "fused_kda_gate_npu", fused_kda_gate_npu)  # noqa: B010
