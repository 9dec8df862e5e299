"""kda on a CPU: gate, decode and the exact prefill in numba; the fast prefill is in chunk_cpu.py."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from sglang_k3.kernels.kda.chunk_cpu import extend_chunk
from sglang_k3.kernels.kda.token_cpu import SCRATCH_ROWS, token
from sglang_k3.kernels.registry import register
from sglang_k3.kernels.row_math import (
    array_of,
    exp,
    float_rows,
    fp32_or_bf16,
    sigmoid,
    softplus,
    use_torch_threads,
)

__all__ = ["decode", "extend_chunk", "extend_recurrent", "gate"]


@njit(cache=True, nogil=True, error_model="numpy")
def _head_gate(f, bias, rate, bounded, lower_bound, g) -> None:
    if bounded:
        for i in range(f.shape[0]):
            g[i] = lower_bound * sigmoid(rate * (f[i] + bias[i]))
    else:
        for i in range(f.shape[0]):
            g[i] = -rate * softplus(f[i] + bias[i])


@njit(cache=True, nogil=True, error_model="numpy", parallel=True)
def _gate(f, b, A_log, dt_bias, bounded, lower_bound, g, beta) -> None:
    heads = g.shape[1]
    for item in prange(g.shape[0] * heads):
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
    use_torch_threads()
    _gate(
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


@njit(cache=True, nogil=True, error_model="numpy", parallel=True)
def _walk(
    q, k, v, g, beta, state_pool, slots, cu_seqlens, fresh, track_offsets, track_slots, scale, o
) -> None:
    """Each (request, head) alone, token after token."""
    heads, width = q.shape[1], q.shape[2]
    for item in prange(slots.shape[0] * heads):
        n = item // heads
        h = item % heads
        if slots[n] < 0:
            continue
        state = state_pool[slots[n], h]
        scratch = np.empty((SCRATCH_ROWS, width), np.float32)
        if fresh[n]:
            state[:] = 0
        begin, end = cu_seqlens[n], cu_seqlens[n + 1]
        for t in range(begin, end):
            if t - begin == track_offsets[n] and track_slots[n] >= 0:
                state_pool[track_slots[n], h] = state
            token(q[t, h], k[t, h], v[t, h], g[t, h], beta[t, h], scale, state, scratch, o[t, h])
        if end - begin == track_offsets[n] and track_slots[n] >= 0:
            state_pool[track_slots[n], h] = state


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
    o = torch.zeros(v.shape, dtype=torch.float32)
    use_torch_threads()
    _walk(
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
