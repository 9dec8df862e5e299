"""Verify and commit on a CPU in the fast mode: all tokens of a block at once, as products with the state.

With d the decays of a block's tokens and P_i = d_1 ... d_i their product up to token i, what token i reads
of S is (S diag(P_i)) k_i, minus nothing that needs S again: the tokens before it in the block are known by
their u and k. So S meets all k_i P_i and q_i P_i in one pass, and the rest is triangular and small. Recorded
tokens that S lacks (the tail) come in the same way, or enter S on the way (fold). Sums run in another order
than token by token, so bits differ from plain decode's: the exact mode uses records_cpu.py.

Source: the chunk form of arXiv 2510.26692, for a block as short as a draft, without writing S.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit

from sglang_k3.kernels.kda.block_vectors import COLUMNS, PADDING, TILE, rank_update, tile_products, turn_rows
from sglang_k3.kernels.kda.chunk_rows_cpu import NEGLIGIBLE
from sglang_k3.kernels.kda.records_cpu import load_rows, record_inputs, run_commit, run_verify, store_rows
from sglang_k3.kernels.kda.reference import NORM_EPS
from sglang_k3.kernels.registry import register
from sglang_k3.kernels.row_math import dot, exp, fp32_or_bf16, widen
from sglang_k3.kernels.row_vectors import ROWS, table_dots

__all__ = ["commit", "verify"]

_EPS = np.float32(NORM_EPS)
_ZERO = np.float32(0)
_ONE = np.float32(1)
_AHEAD = 2 * TILE
"""How far ahead rows of a state are asked for; what lies behind the last state is ignored."""

_GROUP = 2 * COLUMNS
"""Vectors that meet a tile at a time: the keys of COLUMNS tokens, and their queries."""


@njit(cache=True, nogil=True, error_model="numpy")
def _key_column(i) -> int:
    """Which of the products is token i's with its key; its query's is COLUMNS further on."""
    return i // COLUMNS * _GROUP + i % COLUMNS


@njit(cache=True, nogil=True, error_model="numpy")
def _tail_keys(bank_k, bank_g, start, count, h, keys) -> None:
    """keys[1 + i] = k_i / |k_i| times the decays of the recorded tokens behind it, i < count; keys[0] = the
    product of all their decays. bank_k, bank_g [R, H, K]; keys [>= count + 1, >= K], zero behind K."""
    ring, width = bank_k.shape[0], bank_k.shape[2]
    for c in range(width):
        keys[0, c] = _ONE
    for back in range(count):
        i = count - back
        at = (start + i - 1) % ring
        widen(bank_k[at, h], keys[i])
        factor = _ONE / math.sqrt(dot(keys[i], keys[i]) + _EPS)
        for c in range(width):
            keys[i, c] *= factor * keys[0, c]
        for c in range(width):
            decayed = keys[0, c] * exp(bank_g[at, h, c])
            keys[0, c] = _ZERO if decayed < NEGLIGIBLE else decayed


@njit(cache=True, nogil=True, error_model="numpy")
def _tail_factors(bank_u, start, count, h, factors) -> None:
    """factors[i] = u of the i-th recorded token, zero behind V; bank_u [R, H, V]."""
    ring, values = bank_u.shape[0], bank_u.shape[2]
    for i in range(count):
        at = (start + i) % ring
        for r in range(values):
            factors[i, r] = bank_u[at, h, r]


@njit(cache=True, nogil=True, error_model="numpy")
def _block_inputs(q, k, g, begin, tokens, scale, h, asked, rows, mixing) -> None:
    """What a block's tokens ask of the state, and of each other.

    asked [columns, K']: k_i P_i and q_i P_i. rows [>= tokens + 4, K']: scratch, zero behind K. mixing
    [tokens', 2, tokens']: of token i's key and of its query with the key of an earlier token j (or its own,
    for the query), decayed on the way.
    """
    width = k.shape[2]
    last = rows.shape[0] - 4
    running, decays, key, query = last, last + 1, last + 2, last + 3
    for c in range(width):
        rows[running, c] = _ONE
    for i in range(tokens):
        t, column = begin + i, _key_column(i)
        for c in range(width):
            rows[decays, c] = exp(g[t, h, c])
        for c in range(width):
            decayed = rows[running, c] * rows[decays, c]
            rows[running, c] = _ZERO if decayed < NEGLIGIBLE else decayed
            rows[key, c] = k[t, h, c]
            rows[query, c] = q[t, h, c]
        squares = _row_products(rows, last, key, query)
        key_factor = _ONE / math.sqrt(squares[0][2] + _EPS)
        query_factor = scale * (_ONE / math.sqrt(squares[1][3] + _EPS))
        for c in range(width):
            rows[key, c] *= key_factor
            rows[query, c] *= query_factor
        for c in range(width):
            asked[column, c] = rows[running, c] * rows[key, c]
            asked[column + COLUMNS, c] = rows[running, c] * rows[query, c]
        for j in range(i):
            for c in range(width):
                rows[j, c] *= rows[decays, c]
        for c in range(width):
            rows[i, c] = rows[key, c]
        for j in range(0, i + 1, ROWS):
            with_key, with_query = _row_products(rows, j, key, query)
            for r in range(ROWS):
                mixing[i, 0, j + r], mixing[i, 1, j + r] = with_key[r], with_query[r]


@njit(cache=True, nogil=True, error_model="numpy")
def _row_products(rows, first, a, b):
    """Of ROWS rows from `first` on with row a, and with row b."""
    a0, b0, a1, b1, a2, b2, a3, b3 = table_dots(rows, first, rows.shape[1], rows, a, b, rows.shape[1])
    return (a0, a1, a2, a3), (b0, b1, b2, b3)


@njit(cache=True, nogil=True, error_model="numpy")
def _tail_products(keys, tail, vectors, groups, tile, sums) -> None:
    """sums [columns, >= tail] = of the block's vectors with the tail's keys; then the vectors take the tail's
    decays on, with which they meet the state."""
    padded = tile.shape[1]
    for first in range(0, tail, TILE):
        load_rows(keys, 1 + first, min(TILE, tail - first), tile)
        for group in range(groups):
            tile_products(tile, vectors, sums, group * _GROUP, first, tile, 0)
    for panel in range(0, 2 * groups * padded, padded):
        for c in range(padded):
            decay = keys[0, c]
            for j in range(COLUMNS):
                vectors[panel + c, j] *= decay


@njit(cache=True, nogil=True, error_model="numpy")
def _add_tail(sums, tail, tokens, factors, products) -> None:
    """products [columns, V'] += what the tail's u [tail, V'] add to them."""
    for i in range(tokens):
        for column in (_key_column(i), _key_column(i) + COLUMNS):
            for j in range(tail):
                weight = sums[column, j]
                for r in range(products.shape[1]):
                    products[column, r] += weight * factors[j, r]


@njit(cache=True, nogil=True, error_model="numpy")
def _solve(v, beta, begin, tokens, h, products, mixing, u, o) -> None:
    """u and o of a block from the products [columns, V'] of what came before it: forward substitution."""
    values = v.shape[2]
    for i in range(tokens):
        t, column = begin + i, _key_column(i)
        for r in range(values):
            u[i, r] = products[column, r]
        for j in range(i):
            weight = mixing[i, 0, j]
            for r in range(values):
                u[i, r] += weight * u[j, r]
        for r in range(values):
            u[i, r] = beta[t, h] * (v[t, h, r] - u[i, r])
        for r in range(values):
            o[t, h, r] = products[column + COLUMNS, r]
        for j in range(i + 1):
            weight = mixing[i, 1, j]
            for r in range(values):
                o[t, h, r] += weight * u[j, r]


@njit(cache=True, nogil=True, error_model="numpy")
def _most_tokens(cu_seqlens) -> int:
    most = 0
    for n in range(cu_seqlens.shape[0] - 1):
        most = max(most, cu_seqlens[n + 1] - cu_seqlens[n])
    return most


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
    heads, width, values, ring = q.shape[1], q.shape[2], v.shape[2], bank_u.shape[1]
    padded, high = -(-width // PADDING) * PADDING, -(-values // TILE) * TILE
    most = _most_tokens(cu_seqlens)
    columns = -(-most // COLUMNS) * _GROUP
    tile = np.zeros((TILE, padded), np.float32)
    keys = np.zeros((ring + 1, padded), np.float32)
    factors = np.zeros((ring, high), np.float32)
    vectors = np.zeros((columns * padded // COLUMNS, COLUMNS), np.float32)
    asked = np.zeros((columns, padded), np.float32)
    rows = np.zeros((-(-most // ROWS) * ROWS + 4, padded), np.float32)
    mixing = np.zeros((most, 2, -(-most // ROWS) * ROWS), np.float32)
    products = np.zeros((columns, high), np.float32)
    tail_sums = np.zeros((columns, -(-ring // TILE) * TILE), np.float32)
    u = np.zeros((most, high), np.float32)
    for item in range(first, last):
        n = item // heads
        h = item % heads
        begin, end = cu_seqlens[n], cu_seqlens[n + 1]
        if slots[n] < 0:
            o[begin:end, h] = _ZERO
            continue
        # All heads of a request in one matrix: rows asked for ahead of time are the next head's at the end.
        states, top, bank = state_pool[slots[n]].reshape(heads * values, width), h * values, bank_rows[n]
        start, tail, tokens = starts[n], tails[n], end - begin
        fold = fold_slots[n] >= 0
        folded = state_pool[max(fold_slots[n], 0), h]
        groups = -(-tokens // COLUMNS)
        _block_inputs(q, k, g, begin, tokens, scale, h, asked, rows, mixing)
        for column in range(0, groups * _GROUP, COLUMNS):
            turn_rows(asked, column, vectors, column // COLUMNS * padded)
        if tail:
            _tail_keys(bank_k[bank], bank_g[bank], start, tail, h, keys)
            _tail_factors(bank_u[bank], start, tail, h, factors)
            if not fold:
                _tail_products(keys, tail, vectors, groups, tile, tail_sums)
        for r in range(0, values, TILE):
            size = min(TILE, values - r)
            load_rows(states, top + r, size, tile)
            ahead = top + r + _AHEAD
            if fold:
                if tail:
                    rank_update(tile, keys, tail, factors, 0, r, states, ahead)
                store_rows(tile, size, folded, r)
            for group in range(groups):
                tile_products(tile, vectors, products, group * _GROUP, r, states, ahead)
        if tail and not fold:
            _add_tail(tail_sums, tail, tokens, factors, products)
        _solve(v, beta, begin, tokens, h, products, mixing, u, o)
        for i in range(tokens):
            at = (start + tail + i) % ring
            for r in range(values):
                bank_u[bank, at, h, r] = u[i, r]
            record_inputs(k, g, begin + i, h, bank_k[bank], bank_g[bank], at)


@register("kda.verify", "block", preference=20, supports=fp32_or_bf16)
def verify(*arguments: Any) -> torch.Tensor:
    """See `reference.verify`. state_pool and bank_k fp32 or bf16."""
    return run_verify(_verify, *arguments)


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
    requests, heads = slots.shape[0], state_pools.shape[2]
    values, width, ring = state_pools.shape[3], state_pools.shape[4], bank_u.shape[2]
    padded, high = -(-width // PADDING) * PADDING, -(-values // TILE) * TILE
    tile = np.zeros((TILE, padded), np.float32)
    before_keys = np.zeros((ring + 1, padded), np.float32)
    behind_keys = np.zeros((ring + 1, padded), np.float32)
    factors = np.zeros((ring, high), np.float32)
    for item in range(first, last):
        layer = item // (requests * heads)
        n = item // heads % requests
        h = item % heads
        count, start = counts[n], starts[n]
        if slots[n] < 0 or count <= 0:
            continue
        states, top = state_pools[layer, slots[n]].reshape(heads * values, width), h * values
        bank = bank_rows[n]
        tracked = track_slots[n] >= 0 and 0 <= track_offsets[n] <= count
        track = state_pools[layer, max(track_slots[n], 0), h]
        target = state_pools[layer, target_slots[n], h]
        before = track_offsets[n] if tracked else count
        _tail_keys(bank_k[layer, bank], bank_g[layer, bank], start, before, h, before_keys)
        _tail_keys(bank_k[layer, bank], bank_g[layer, bank], start + before, count - before, h, behind_keys)
        _tail_factors(bank_u[layer, bank], start, count, h, factors)
        for r in range(0, values, TILE):
            size = min(TILE, values - r)
            ahead = top + r + _AHEAD
            load_rows(states, top + r, size, tile)
            if before:
                rank_update(tile, before_keys, before, factors, 0, r, states, ahead)
            if tracked:
                store_rows(tile, size, track, r)
            if before < count:
                rank_update(tile, behind_keys, count - before, factors, before, r, states, ahead)
            store_rows(tile, size, target, r)


@register("kda.commit", "block", preference=20, supports=fp32_or_bf16)
def commit(*arguments: Any) -> None:
    """See `reference.commit`: one call for all layers. state_pools and bank_k fp32 or bf16; a bf16 state is
    rounded once a call."""
    run_commit(_commit, *arguments)
