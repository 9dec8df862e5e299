"""Verify and commit on a CPU: the rows of a state go through all drafted tokens while they are in L1.

A row of S [V, K] needs nothing of the other rows, so S is read once, not once a token, and verify keeps the
advanced rows nowhere. The arithmetic of a row is `token_cpu`'s, so u, o and a committed S are plain decode's,
bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

from sglang_k3.kernels.kda.token_cpu import (
    AHEAD,
    PREPARED_ROWS,
    advance_row,
    advance_rows,
    prepare,
    prepare_key,
    replay_rows,
)
from sglang_k3.kernels.registry import register
from sglang_k3.kernels.row_math import LANES, array_of, float_rows, fp32_or_bf16, narrow, widen
from sglang_k3.kernels.row_vectors import ROWS
from sglang_k3.kernels.split import over_items

__all__ = ["commit", "outputs", "verify"]

_ZERO = np.float32(0)


def outputs(v: torch.Tensor, cu_seqlens: np.ndarray) -> torch.Tensor:
    """o like v [T, H, V] in fp32, zero behind the last request's tokens; the kernel writes all the rest.

    (A tensor of zeros comes in fresh pages, whose faults cost more than a small decode.)
    """
    o = torch.empty(v.shape, dtype=torch.float32)
    if cu_seqlens[-1] < v.shape[0]:
        o[cu_seqlens[-1] :] = 0
    return o


# The loops below name elements, not rows: a row cut out in numba counts references, two atomic additions
# each, which cost more than the arithmetic of the row.


def load_rows(state: Any, first: Any, count: Any, rows: Any) -> None:
    """Inside numba: rows[:count] = state[first : first + count] as fp32, from fp32 or bf16 bits."""
    raise NotImplementedError("only inside numba code")


@overload(load_rows, jit_options={"cache": True})
def _load_rows_for(state, first, count, rows):
    if state.dtype == types.float32:

        def copy(state, first, count, rows):
            for r in range(count):
                for c in range(state.shape[1]):
                    rows[r, c] = state[first + r, c]

        return copy

    def from_bits(state, first, count, rows):
        for r in range(count):
            widen(state[first + r], rows[r])

    return from_bits


def store_rows(rows: Any, count: Any, state: Any, first: Any) -> None:
    """Inside numba: the inverse of `load_rows`."""
    raise NotImplementedError("only inside numba code")


@overload(store_rows, jit_options={"cache": True})
def _store_rows_for(rows, count, state, first):
    if state.dtype == types.float32:

        def copy(rows, count, state, first):
            for r in range(count):
                for c in range(state.shape[1]):
                    state[first + r, c] = rows[r, c]

        return copy

    def to_bits(rows, count, state, first):
        for r in range(count):
            narrow(rows[r], state[first + r])

    return to_bits


def _settle_rows(rows: Any, state: Any, count: Any) -> None:
    """Inside numba: the first `count` rows, fp32, become what the state would keep of them."""
    raise NotImplementedError("only inside numba code")


@overload(_settle_rows, jit_options={"cache": True})
def _settle_rows_for(rows, state, count):
    if state.dtype == types.float32:
        return lambda rows, state, count: None

    def through_bits(rows, state, count):
        bits = np.empty(rows.shape[1], np.uint16)
        for r in range(count):
            narrow(rows[r], bits)
            widen(bits, rows[r])

    return through_bits


@njit(cache=True, nogil=True, error_model="numpy")
def _replay_group(state, u, start, tail, h, prepared, first, size, rows) -> None:
    """rows[:size] of a state [V, K], loaded, go through the recorded tokens start .. start + tail of a ring.

    u [R, H, V]; prepared: rows i * PREPARED_ROWS are those of the i-th of these tokens.
    """
    ring, last = u.shape[0], u.shape[2] - 1
    for i in range(tail):
        at = (start + i) % ring
        # Behind the last row of a state the scratch holds an older row, whose result nobody reads.
        replay_rows(
            rows,
            0,
            prepared,
            i * PREPARED_ROWS,
            u[at, h, first],
            u[at, h, min(first + 1, last)],
            u[at, h, min(first + 2, last)],
            u[at, h, min(first + 3, last)],
            state,
            first + AHEAD if i == 0 else -1,
        )
        _settle_rows(rows, state, size)


@njit(cache=True, nogil=True, error_model="numpy")
def _prepare_tail(bank_k, bank_g, bank, start, tail, h, key, prepared) -> None:
    """What `_replay_group` needs of the recorded tokens; bank_k, bank_g [B, R, H, K]; key [K] scratch."""
    ring = bank_k.shape[1]
    for i in range(tail):
        at = (start + i) % ring
        widen(bank_k[bank, at, h], key)
        prepare_key(key, bank_g[bank, at, h], prepared, i * PREPARED_ROWS)


@njit(cache=True, nogil=True, error_model="numpy")
def _verify_head(
    q, k, v, g, beta, state, begin, end, start, tail, fold, folded, scale, h, o, u, prepared, key_query, rows
) -> None:
    """Tokens begin .. end of head h: o [T, H, V] and u [R, H, V]; state [V, K] is only read, and goes to
    `folded` behind the tail if `fold`. The first rows of `prepared` are the tail's."""
    values, ring = state.shape[0], u.shape[0]
    for i in range(end - begin):
        t = begin + i
        key_query[i] = prepare(q[t, h], k[t, h], g[t, h], scale, prepared, (tail + i) * PREPARED_ROWS)
    for first in range(0, values, ROWS):
        size = min(ROWS, values - first)
        load_rows(state, first, size, rows)
        _replay_group(state, u, start, tail, h, prepared, first, size, rows)
        if fold:
            store_rows(rows, size, folded, first)
        for i in range(end - begin):
            t = begin + i
            at = (start + tail + i) % ring
            base = (tail + i) * PREPARED_ROWS
            if size == ROWS:
                outputs, added = advance_rows(
                    rows,
                    0,
                    prepared,
                    base,
                    key_query[i],
                    v[t, h, first],
                    v[t, h, first + 1],
                    v[t, h, first + 2],
                    v[t, h, first + 3],
                    beta[t, h],
                    state,
                    first + ROWS if i == 0 else -1,
                )
                o[t, h, first], o[t, h, first + 1], o[t, h, first + 2], o[t, h, first + 3] = outputs
                u[at, h, first], u[at, h, first + 1], u[at, h, first + 2], u[at, h, first + 3] = added
            else:
                for r in range(size):
                    o[t, h, first + r], u[at, h, first + r] = advance_row(
                        rows[r], prepared, base, key_query[i], v[t, h, first + r], beta[t, h]
                    )
            _settle_rows(rows, state, size)


@njit(cache=True, nogil=True, error_model="numpy")
def _verify(
    first,
    last,
    q,
    k,
    v,
    g,
    beta,
    state_pool,
    slots,
    cu_seqlens,
    bank_rows,
    bank_u,
    bank_k,
    bank_g,
    starts,
    tails,
    fold_slots,
    scale,
    o,
) -> None:
    heads, width, ring = q.shape[1], q.shape[2], bank_u.shape[1]
    prepared = np.empty((ring * PREPARED_ROWS, width), np.float32)
    key_query = np.empty(ring, np.float32)
    rows = np.zeros((ROWS, width), np.float32)
    key = np.empty(width, np.float32)
    for item in range(first, last):
        n = item // heads
        h = item % heads
        begin, end = cu_seqlens[n], cu_seqlens[n + 1]
        if slots[n] < 0:
            o[begin:end, h] = _ZERO
            continue
        bank, start, tail = bank_rows[n], starts[n], tails[n]
        _prepare_tail(bank_k, bank_g, bank, start, tail, h, key, prepared)
        _verify_head(
            q,
            k,
            v,
            g,
            beta,
            state_pool[slots[n], h],
            begin,
            end,
            start,
            tail,
            fold_slots[n] >= 0,
            state_pool[max(fold_slots[n], 0), h],
            scale,
            h,
            o,
            bank_u[bank],
            prepared,
            key_query,
            rows,
        )
        for i in range(end - begin):
            record_inputs(k, g, begin + i, h, bank_k[bank], bank_g[bank], (start + tail + i) % ring)


@njit(cache=True, nogil=True, error_model="numpy")
def record_inputs(k, g, t, h, bank_k, bank_g, at) -> None:
    """What a token's record keeps of its inputs: k, g [T, H, K] to row `at` of bank_k, bank_g [R, H, K]."""
    narrow(k[t, h], bank_k[at, h])
    for c in range(g.shape[2]):
        bank_g[at, h, c] = g[t, h, c]


def run_verify(
    kernel: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    bank_rows: torch.Tensor,
    bank_u: torch.Tensor,
    bank_k: torch.Tensor,
    bank_g: torch.Tensor,
    starts: torch.Tensor,
    tails: torch.Tensor,
    fold_slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`reference.verify` by a compiled kernel over the heads of all requests."""
    offsets = cu_seqlens.numpy()
    o = outputs(v, offsets)
    over_items(
        kernel,
        slots.shape[0] * v.shape[1],
        q.numel() * v.shape[2] // LANES,
        float_rows(q),
        float_rows(k),
        float_rows(v),
        float_rows(g),
        float_rows(beta),
        array_of(state_pool),
        slots.numpy(),
        offsets,
        bank_rows.numpy(),
        bank_u.numpy(),
        array_of(bank_k),
        bank_g.numpy(),
        starts.numpy(),
        tails.numpy(),
        fold_slots.numpy(),
        np.float32(scale),
        o.numpy(),
    )
    return o.to(v.dtype)


@register("kda.verify", "row by row", preference=10, exact=True, supports=fp32_or_bf16)
def verify(*arguments: Any) -> torch.Tensor:
    """See `reference.verify`. state_pool and bank_k fp32 or bf16."""
    return run_verify(_verify, *arguments)


@njit(cache=True, nogil=True, error_model="numpy")
def _replay_head(state, target, u, start, count, track_offset, track, h, prepared, rows) -> None:
    """state [V, K] moves on by `count` recorded tokens, into target; after track_offset it is kept in track
    too."""
    values = state.shape[0]
    before = min(max(track_offset, 0), count)
    for first in range(0, values, ROWS):
        size = min(ROWS, values - first)
        load_rows(state, first, size, rows)
        _replay_group(state, u, start, before, h, prepared, first, size, rows)
        if 0 <= track_offset <= count:
            store_rows(rows, size, track, first)
        rest = prepared[before * PREPARED_ROWS :]
        _replay_group(state, u, start + before, count - before, h, rest, first, size, rows)
        store_rows(rows, size, target, first)


@njit(cache=True, nogil=True, error_model="numpy")
def _commit(
    first,
    last,
    state_pools,
    slots,
    target_slots,
    bank_rows,
    bank_u,
    bank_k,
    bank_g,
    starts,
    counts,
    track_offsets,
    track_slots,
) -> None:
    requests, heads, width = slots.shape[0], state_pools.shape[2], state_pools.shape[4]
    prepared = np.empty((bank_u.shape[2] * PREPARED_ROWS, width), np.float32)
    rows = np.zeros((ROWS, width), np.float32)
    key = np.empty(width, np.float32)
    for item in range(first, last):
        layer = item // (requests * heads)
        n = item // heads % requests
        h = item % heads
        if slots[n] < 0 or counts[n] <= 0:
            continue
        bank = bank_rows[n]
        _prepare_tail(bank_k[layer], bank_g[layer], bank, starts[n], counts[n], h, key, prepared)
        tracked = track_slots[n] >= 0
        _replay_head(
            state_pools[layer, slots[n], h],
            state_pools[layer, target_slots[n], h],
            bank_u[layer, bank],
            starts[n],
            counts[n],
            track_offsets[n] if tracked else -1,
            state_pools[layer, max(track_slots[n], 0), h],
            h,
            prepared,
            rows,
        )


def run_commit(
    kernel: Any,
    state_pools: torch.Tensor,
    slots: torch.Tensor,
    target_slots: torch.Tensor,
    bank_rows: torch.Tensor,
    bank_u: torch.Tensor,
    bank_k: torch.Tensor,
    bank_g: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    track_offsets: torch.Tensor,
    track_slots: torch.Tensor,
) -> None:
    """`reference.commit` by a compiled kernel over the heads of all requests and layers."""
    layers, _, heads, values, width = state_pools.shape
    requests = slots.shape[0]
    over_items(
        kernel,
        layers * requests * heads,
        layers * requests * heads * values * width // LANES,
        array_of(state_pools),
        slots.numpy(),
        target_slots.numpy(),
        bank_rows.numpy(),
        bank_u.numpy(),
        array_of(bank_k),
        bank_g.numpy(),
        starts.numpy(),
        counts.numpy(),
        track_offsets.numpy(),
        track_slots.numpy(),
    )


@register("kda.commit", "row by row", preference=10, exact=True, supports=fp32_or_bf16)
def commit(*arguments: Any) -> None:
    """See `reference.commit`: one call for all layers. state_pools and bank_k fp32 or bf16."""
    run_commit(_commit, *arguments)
