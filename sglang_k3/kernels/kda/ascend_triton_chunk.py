"""Launches of kda/triton_chunk.py as a torch operator that graphs take. Not run on hardware."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_k3.kernels import triton_targets
from sglang_k3.kernels.ascend import DEVICE
from sglang_k3.kernels.kda.ascend_chunk import Plan
from sglang_k3.kernels.kda.ascend_triton import packed_rows, require_packed
from sglang_k3.kernels.registry import Call, register
from sglang_k3.kernels.triton_targets import NAME, PREFERENCE, holding, power_of_two, programs, start

CHUNK, _BLOCK = 64, 16
_LEAST_GATE = -8
"""Log decay of a token at least: half a block of them, an exponent of 64, leaves fp32 room for the rows."""
_WIDEST = 128
"""K and V at most: a chunk's rows are held whole."""


def refusal(call: Call) -> str | None:
    """A caller says with gate_bound how low a token's log decay goes."""
    bound = call.dims.get("gate_bound")
    if bound is None or bound < _LEAST_GATE:
        given = "without a bound" if bound is None else f"down to {bound}"
        return f"gates {given} overflow its products; it takes a safe gate's, down to {_LEAST_GATE}"
    for name in ("K", "V"):
        if (size := call.dims.get(name, 0)) > _WIDEST:
            return f"{name} {size} is more than the {_WIDEST} columns that it holds of a chunk's rows"
    return triton_targets.refusal(call)


class Chunks(NamedTuple):
    """begins, counts [C] int64: tokens of each chunk (0 of those that are none). firsts [2 N + 1] int64: the
    chunks of each request, and of them those behind its checkpoint. track_slots [N], -1 for none."""

    begins: torch.Tensor
    counts: torch.Tensor
    firsts: torch.Tensor
    track_slots: torch.Tensor


def chunks(
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    track_offsets: torch.Tensor,
    track_slots: torch.Tensor,
    tokens: int,
) -> Chunks:
    """Chunks of at most CHUNK tokens, none across a checkpoint; the host knows how many there are at most."""
    lengths = cu_seqlens.diff()
    tracked = (track_slots >= 0) & (track_offsets >= 0)
    before = torch.where(tracked, track_offsets, lengths)
    sizes = torch.stack([before, lengths - before], 1).masked_fill((slots < 0).unsqueeze(1), 0).flatten()
    starts = torch.stack([cu_seqlens[:-1], cu_seqlens[:-1] + before], 1).flatten()
    firsts = torch.cat([sizes.new_zeros(1), ((sizes + CHUNK - 1) // CHUNK).cumsum(0)])
    chunk = torch.arange(tokens // CHUNK + len(sizes), device=slots.device)
    piece = torch.searchsorted(firsts[1:], chunk, right=True).clamp(max=len(sizes) - 1)
    passed = (chunk - firsts[piece]) * CHUNK
    counts = (sizes[piece] - passed).clamp(0, CHUNK)
    return Chunks(starts[piece] + passed, counts, firsts, torch.where(tracked, track_slots, -1))


def _value_rows(value_dim: int, states: int) -> int:
    """Rows of V a tile: all of a head's, or fewer where cores stayed idle. Each tile reads a chunk's keys."""
    rows = holding(value_dim)
    while rows > 32 and states * -(-value_dim // rows) < programs(1 << 20, cube=True)[0]:
        rows //= 2
    return rows


@torch.library.custom_op("sglang_k3::kda_extend", mutates_args=("state_pool",))
def extend_chunks(
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
    """See `extend`. Raises ValueError for a K that is no power of two and for K or V above 128."""
    from sglang_k3.kernels.kda import triton_chunk as kernels

    tokens, heads, value_dim = v.shape
    key_dim = power_of_two("K", k.shape[2])
    if max(key_dim, value_dim) > _WIDEST:
        raise ValueError(f"K = {key_dim}, V = {value_dim}: the Triton prefill holds {_WIDEST} of each")
    require_packed(state_pool[0])
    # Rows of padding, and of requests without a slot, are nobody's.
    out = v.new_zeros(tokens, heads, value_dim)
    if not len(slots):
        return out
    q, k, v, g, beta = packed_rows(q), packed_rows(k), packed_rows(v), g.contiguous(), beta.contiguous()
    table = chunks(slots, cu_seqlens, track_offsets, track_slots, tokens)
    count = len(table.begins)

    def room(*shape: int) -> torch.Tensor:
        return g.new_empty(count, heads, *shape, dtype=torch.float32)

    coupling, mixing, factors = room(CHUNK, CHUNK), room(CHUNK, CHUNK), room(2, CHUNK)
    queries, keys, asks = (room(CHUNK, key_dim) for _ in range(3))
    values, totals = room(CHUNK, value_dim), room(key_dim)
    spans = table.begins, table.counts
    items = count * heads * (CHUNK // _BLOCK)
    start(kernels.pairs, items, cube=True)(
        q,
        k,
        g,
        beta,
        *spans,
        coupling,
        mixing,
        factors,
        scale,
        items,
        q.stride(0),
        k.stride(0),
        H=heads,
        K=key_dim,
        BT=CHUNK,
        BS=_BLOCK,
    )
    items = count * heads
    start(kernels.solve, items, cube=True)(
        q,
        k,
        v,
        g,
        beta,
        *spans,
        coupling,
        factors,
        queries,
        keys,
        asks,
        values,
        totals,
        items,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        H=heads,
        K=key_dim,
        V=value_dim,
        BV=holding(value_dim),
        BT=CHUNK,
        LEVELS=CHUNK.bit_length() - 1,
    )
    rows = _value_rows(value_dim, len(slots) * heads)
    items = len(slots) * heads * -(-value_dim // rows)
    start(kernels.walk, items, cube=True)(
        queries,
        keys,
        asks,
        values,
        totals,
        mixing,
        *spans,
        table.firsts,
        state_pool,
        slots,
        fresh.to(torch.uint8),
        table.track_slots,
        out,
        items,
        state_pool.stride(0),
        H=heads,
        K=key_dim,
        V=value_dim,
        BV=rows,
        BT=CHUNK,
    )
    return out


@torch.library.register_fake("sglang_k3::kda_extend")
def _(q, k, v, *rest) -> torch.Tensor:
    return v.new_empty(v.shape)


@register("kda.extend", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
def extend(
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
    layout: Plan | None = None,
) -> torch.Tensor:
    """See `reference.extend`, for gates of a bound. layout is not needed: lengths are read on the device.

    States and checkpoints are computed in fp32 whatever the activations' dtype; a bf16 state is rounded
    where it is stored. 165 KB of scratch a chunk and head (K = V = 128), for a layer at a time.
    """
    spans = slots, cu_seqlens, fresh, track_offsets, track_slots
    return extend_chunks(q, k, v, g, beta, state_pool, *spans, scale)
