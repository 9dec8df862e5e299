"""kda on a CPU: gate, decode and the exact prefill in numba; the fast prefill is in chunk_cpu.py, verify and
commit in records_cpu.py, their fast forms in block_cpu.py."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from sglang_k3.kernels.kda import block_cpu
from sglang_k3.kernels.kda.chunk_cpu import extend_chunk
from sglang_k3.kernels.kda.records_cpu import commit, outputs, verify
from sglang_k3.kernels.kda.token_cpu import SCRATCH_ROWS, token
from sglang_k3.kernels.registry import register
from sglang_k3.kernels.row_math import (
    LANES,
    array_of,
    exp,
    float_rows,
    fp32_or_bf16,
    sigmoid,
    softplus,
)
from sglang_k3.kernels.split import over_items

_ZERO = np.float32(0)

__all__ = ["block_cpu", "commit", "decode", "extend_chunk", "extend_recurrent", "gate", "verify"]


@njit(cache=True, nogil=True, error_model="numpy")
def _head_gate(f, bias, rate, bounded, lower_bound, g) -> None:
    if bounded:
        for i in range(f.shape[0]):
            g[i] = lower_bound * sigmoid(rate * (f[i] + bias[i]))
    else:
        for i in range(f.shape[0]):
            g[i] = -rate * softplus(f[i] + bias[i])


@njit(cache=True, nogil=True, error_model="numpy")
def _gate(first, last, f, b, A_log, dt_bias, bounded, lower_bound, g, beta) -> None:
    heads = g.shape[1]
    for item in range(first, last):
        t = item // heads
        h = item % heads
        beta[t, h] = sigmoid(b[t, h])
        _head_gate(f[t, h], dt_bias[h], exp(A_log[h]), bounded, lower_bound, g[t, h])


@register("kda.gate", "numba", preference=10, exact=True, supports=fp32_or_bf16)
def gate(
    f: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.gate`."""
    tokens, heads = b.shape
    width = f.shape[1] // heads
    g = torch.empty(tokens, heads, width, dtype=torch.float32)
    beta = torch.empty(tokens, heads, dtype=torch.float32)
    bound = np.float32(0.0 if lower_bound is None else lower_bound)
    over_items(
        _gate,
        g.shape[0] * heads,
        f.numel(),
        float_rows(f).reshape(tokens, heads, width),
        float_rows(b),
        float_rows(A_log),
        float_rows(dt_bias).reshape(heads, width),
        lower_bound is not None,
        bound,
        g.numpy(),
        beta.numpy(),
    )
    return g, beta


@njit(cache=True, nogil=True, error_model="numpy")
def _copy(source, target) -> None:
    for r in range(source.shape[0]):
        for c in range(source.shape[1]):
            target[r, c] = source[r, c]


@njit(cache=True, nogil=True, error_model="numpy")
def _clear(state) -> None:
    for r in range(state.shape[0]):
        for c in range(state.shape[1]):
            state[r, c] = 0


@njit(cache=True, nogil=True, error_model="numpy")
def _walk_head(
    q, k, v, g, beta, state_pool, slot, begin, end, fresh, track_offset, track_slot, scale, h, o
) -> None:
    """Head h of one request, token after token."""
    state = state_pool[slot, h]
    scratch = np.empty((SCRATCH_ROWS, q.shape[2]), np.float32)
    if fresh:
        _clear(state)
    for t in range(begin, end):
        if t - begin == track_offset and track_slot >= 0:
            _copy(state, state_pool[track_slot, h])
        token(q[t, h], k[t, h], v[t, h], g[t, h], beta[t, h], scale, state, scratch, o[t, h])
    if end - begin == track_offset and track_slot >= 0:
        _copy(state, state_pool[track_slot, h])


@njit(cache=True, nogil=True, error_model="numpy")
def _walk(
    first, last, q, k, v, g, beta, state_pool, slots, cu_seqlens, fresh, track_offsets, track_slots, scale, o
) -> None:
    heads = q.shape[1]
    for item in range(first, last):
        n = item // heads
        if slots[n] < 0:
            o[cu_seqlens[n] : cu_seqlens[n + 1], item % heads] = _ZERO
        else:
            _walk_head(
                q,
                k,
                v,
                g,
                beta,
                state_pool,
                slots[n],
                cu_seqlens[n],
                cu_seqlens[n + 1],
                fresh[n],
                track_offsets[n],
                track_slots[n],
                scale,
                item % heads,
                o,
            )


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: np.ndarray,
    fresh: np.ndarray,
    track_offsets: np.ndarray,
    track_slots: np.ndarray,
    scale: float,
) -> torch.Tensor:
    o = outputs(v, cu_seqlens)
    over_items(
        _walk,
        slots.shape[0] * v.shape[1],
        q.numel() * v.shape[2] // LANES,
        float_rows(q),
        float_rows(k),
        float_rows(v),
        float_rows(g),
        float_rows(beta),
        array_of(state_pool),
        slots.numpy(),
        cu_seqlens,
        fresh,
        track_offsets,
        track_slots,
        np.float32(scale),
        o.numpy(),
    )
    return o.to(v.dtype)


@register("kda.extend", "recurrent", preference=10, exact=True, supports=fp32_or_bf16)
def extend_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    fresh: torch.Tensor,
    track_offsets: torch.Tensor,
    track_slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See `reference.extend`: decode's own arithmetic, token after token. state_pool fp32 or bf16."""
    return _run(
        q,
        k,
        v,
        g,
        beta,
        state_pool,
        slots,
        cu_seqlens.numpy(),
        fresh.numpy(),
        track_offsets.numpy(),
        track_slots.numpy(),
        scale,
    )


@register("kda.decode", "numba", preference=10, exact=True, supports=fp32_or_bf16)
def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See `reference.decode`. state_pool fp32 or bf16."""
    requests = slots.shape[0]
    untracked = np.full(requests, -1)
    return _run(
        q,
        k,
        v,
        g,
        beta,
        state_pool,
        slots,
        np.arange(requests + 1),
        np.zeros(requests, np.bool_),
        untracked,
        untracked,
        scale,
    )
