"""The fast KDA prefill on a CPU: chunks of 64 tokens as matrix products, the state carried between chunks.

With G the running sum of g in a chunk, S0 [V, K] the state before it, k and q normalised (arXiv 2510.26692):
    M_ij = beta_i sum_d k_id k_jd e^(G_id - G_jd), i > j        A_ij = sum_d q_id k_jd e^(G_id - G_jd), i >= j
    u = (I + M)^-1 (beta v - (beta k e^G) S0^T)                 o = (q e^G) S0^T + A u
    S = S0 e^G_last + u^T (k e^(G_last - G))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from sglang_k3.kernels.kda.chunk_rows_cpu import (
    BLOCK,
    BLOCKS_BELOW,
    CHUNK,
    factor_chunks,
    scatter_chunks,
    solve_chunks,
)
from sglang_k3.kernels.native import narrow_vectors
from sglang_k3.kernels.registry import Call, register
from sglang_k3.kernels.row_math import float_rows, fp32_or_bf16
from sglang_k3.kernels.split import over_items

_CHUNK_HEADS = 64  # worked on together: about 18 MB at K = V = 128, so that a last-level cache holds them


class _Inputs(NamedTuple):
    """fp32 rows of the call: q, k, g [T, H, K], v [T, H, V], beta [T, H]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray


@dataclass(frozen=True)
class _Walk:
    """One request's chunks in order. A track offset is always a chunk's start (or the end)."""

    request: int
    begins: list[int]
    counts: list[int]
    track_at: int  # chunks before the state to keep, -1 for none


@dataclass(frozen=True)
class _Buffers:
    """Scratch for up to B chunk-heads; shapes in `factor_chunks`."""

    from_state: torch.Tensor
    values: torch.Tensor
    tail: torch.Tensor
    total: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    coupling: torch.Tensor
    mixing: torch.Tensor
    outputs: torch.Tensor

    @staticmethod
    def allocate(size: int, key_dim: int, value_dim: int) -> _Buffers:
        return _Buffers(
            from_state=torch.empty(size, 2 * CHUNK, key_dim),
            values=torch.empty(size, CHUNK, value_dim),
            tail=torch.empty(size, CHUNK, key_dim),
            total=torch.empty(size, key_dim),
            left=torch.empty(size, BLOCKS_BELOW, 2 * BLOCK, key_dim),
            right=torch.empty(size, BLOCKS_BELOW, CHUNK - BLOCK, key_dim),
            coupling=torch.empty(size, CHUNK, BLOCK),
            mixing=torch.empty(size, CHUNK, CHUNK),
            outputs=torch.empty(size, CHUNK, value_dim),
        )


def _plan(request: int, begin: int, end: int, track_offset: int) -> _Walk:
    """Chunks of at most CHUNK tokens that never straddle the track offset."""
    tracked = track_offset >= 0
    cut = begin + track_offset if tracked else begin
    before = list(range(begin, cut, CHUNK))
    begins = [*before, *range(cut, end, CHUNK)]
    track_at = len(before) if tracked else -1
    ends = [*begins[1:], end][: len(begins)]
    return _Walk(request, begins, [e - b for b, e in zip(begins, ends, strict=True)], track_at)


def _factor(
    inputs: _Inputs, scale: float, begins: np.ndarray, counts: np.ndarray, heads: int, buffers: _Buffers
) -> None:
    """Everything about these chunks that doesn't need the state before them, into the buffers."""
    used = counts.shape[0] * heads
    b = buffers
    over_items(
        factor_chunks,
        used,
        b.from_state.numel(),
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.g,
        inputs.beta,
        np.float32(scale),
        begins,
        counts,
        b.from_state.numpy(),
        b.values.numpy(),
        b.tail.numpy(),
        b.total.numpy(),
        b.left.numpy(),
        b.right.numpy(),
        b.coupling.numpy(),
        b.mixing.numpy(),
    )
    below = torch.matmul(b.left[:used], b.right[:used].transpose(-1, -2))
    over_items(
        solve_chunks,
        used,
        b.from_state.numel(),
        below.numpy(),
        b.coupling.numpy(),
        counts,
        heads,
        b.from_state.numpy(),
        b.values.numpy(),
        b.mixing.numpy(),
    )


def _advance(state: torch.Tensor, buffers: _Buffers, rows: slice) -> None:
    """One chunk of some requests, state [A * H, V, K] in place; their chunk-heads are the buffers' `rows`."""
    read = torch.bmm(buffers.from_state[rows], state.transpose(1, 2))
    u = buffers.values[rows].add_(read[:, :CHUNK])
    torch.baddbmm(read[:, CHUNK:], buffers.mixing[rows], u, out=buffers.outputs[rows])
    state.mul_(buffers.total[rows].unsqueeze(1)).baddbmm_(u.transpose(1, 2), buffers.tail[rows])


def _walk_together(
    walks: list[_Walk],
    inputs: _Inputs,
    scale: float,
    state_pool: torch.Tensor,
    slots: list[int],
    fresh: list[bool],
    track_slots: list[int],
    o: torch.Tensor,
) -> None:
    """Some requests, longest first, chunk after chunk; the requests that still have one are a prefix."""
    heads, value_dim, key_dim = state_pool.shape[1:]
    state = torch.zeros(len(walks), heads, value_dim, key_dim)
    for i, walk in enumerate(walks):
        if not fresh[walk.request]:
            state[i] = state_pool[slots[walk.request]]

    depth = len(walks[0].begins)
    together = max(1, _CHUNK_HEADS // (len(walks) * heads))
    buffers = _Buffers.allocate(min(together, depth) * len(walks) * heads, key_dim, value_dim)
    for first in range(0, depth, together):
        steps = [
            (ordinal, [walk for walk in walks if ordinal < len(walk.begins)])
            for ordinal in range(first, min(first + together, depth))
        ]
        begins = np.array([walk.begins[ordinal] for ordinal, active in steps for walk in active])
        counts = np.array([walk.counts[ordinal] for ordinal, active in steps for walk in active])
        _factor(inputs, scale, begins, counts, heads, buffers)
        row = 0
        for ordinal, active in steps:
            for i, walk in enumerate(active):
                if walk.track_at == ordinal and track_slots[walk.request] >= 0:
                    state_pool[track_slots[walk.request]] = state[i]
            width = len(active) * heads
            _advance(state[: len(active)].view(width, value_dim, key_dim), buffers, slice(row, row + width))
            row += width
        over_items(
            scatter_chunks,
            counts.shape[0] * heads,
            buffers.outputs.numel(),
            buffers.outputs.numpy(),
            begins,
            counts,
            o.numpy(),
        )

    for i, walk in enumerate(walks):
        if walk.track_at == len(walk.begins) and track_slots[walk.request] >= 0:
            state_pool[track_slots[walk.request]] = state[i]
        state_pool[slots[walk.request]] = state[i]


def _supports(call: Call) -> str | None:
    refusal = fp32_or_bf16(call)
    if refusal is None and narrow_vectors():
        return "with vectors of 256 bits the recurrence takes two thirds of the time (benchmarks/kernels.py)"
    return refusal


@register("kda.extend", "chunk", preference=20, supports=_supports)
def extend_chunk(
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
    """See `reference.extend`; agrees with it to about 1e-6 of the outputs' scale in fp32, not bit for bit.

    A bf16 state is rounded where it is stored (at the end and at the track offset), not after every token.
    """
    o = torch.zeros(v.shape, dtype=torch.float32)
    owners, bounds, offsets = slots.tolist(), cu_seqlens.tolist(), track_offsets.tolist()
    walks = [_plan(n, bounds[n], bounds[n + 1], offsets[n]) for n in range(len(owners)) if owners[n] >= 0]
    walks.sort(key=lambda walk: -len(walk.begins))
    inputs = _Inputs(*map(float_rows, (q, k, v, g, beta)))
    per_group = max(1, _CHUNK_HEADS // q.shape[1])
    for first in range(0, len(walks), per_group):
        _walk_together(
            walks[first : first + per_group],
            inputs,
            scale,
            state_pool,
            owners,
            fresh.tolist(),
            track_slots.tolist(),
            o,
        )
    return o.to(v.dtype)
