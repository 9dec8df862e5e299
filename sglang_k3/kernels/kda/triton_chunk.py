"""KDA prefill in Triton for Ascend's cube units: chunks of BT tokens as products (arXiv 2510.26692).

With G the running sum of the log decays in a chunk, S0 [V, K] the state before it, k and q of unit length:
    M_ij = beta_i sum_d k_id k_jd e^(G_id - G_jd), i > j        A_ij = sum_d q_id k_jd e^(G_id - G_jd), i >= j
    X = (I + M)^-1        u = X beta v - (X beta k e^G) S0^T     o = (q e^G) S0^T + A u
    S = S0 e^G_last + u^T (k e^(G_last - G))
`pairs` makes M and A, `solve` what the states are not needed for, `walk` takes a state from chunk to chunk.
Sums of log decays are products with a matrix of zeros and ones, over exactly the tokens between the two that
meet: a difference of two long sums would have lost its last digits. Not run on hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)
"""reference.NORM_EPS; a kernel may read a constexpr of its module alone."""


@triton.jit
def _product(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def pairs(
    q,
    k,
    g,
    beta,
    begins,
    counts,
    coupling,
    mixing,
    factors,
    scale,
    items,
    q_row,
    k_row,
    H: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
):
    """Rows BS * b .. of M and A of one chunk and head an item (C * H * BT / BS).

    q, k [T, H, K] with row strides q_row, k_row; g [T, H, K], beta [T, H] packed; a chunk's tokens are
    begins[c] .. + counts[c]. coupling (M), mixing (A) [C, H, BT, BT], factors [C, H, 2, BT] fp32: what brings
    q to unit length times scale, and k to unit length. Every decay between two tokens is split at the middle
    of the row block's own, so that BS / 2 tokens at the gate's bound are the largest exponent.
    """
    BLOCKS: tl.constexpr = BT // BS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        block = item % BLOCKS
        head = (item // BLOCKS) % H
        chunk = item // (BLOCKS * H)
        c = chunk.to(tl.int64)
        count = tl.load(counts + c)
        if count > 0:
            begin = tl.load(begins + c)
            first = block * BS
            mine = first + tl.arange(0, BS)
            token = tl.arange(0, BT)
            real = mine < count
            seen = (token < first + BS) & (token < count)
            inside = token >= first
            # Sums over the block's tokens up to row i, and over those between key j and the block's begin.
            upto = tl.where(inside[None, :] & (token[None, :] <= mine[:, None]), 1.0, 0.0)
            gap = tl.where((token[None, :] > token[:, None]) & (token[None, :] < first), 1.0, 0.0)
            gap -= tl.where(inside[None, :] & (token[None, :] <= token[:, None]), 1.0, 0.0)
            across = head * K + tl.arange(0, K)[None, :]
            rows = (begin + mine)[:, None]
            query = tl.load(q + rows * q_row + across, mask=real[:, None], other=0.0).to(tl.float32)
            row = tl.load(k + rows * k_row + across, mask=real[:, None], other=0.0).to(tl.float32)
            rows = (begin + token)[:, None]
            key = tl.load(k + rows * k_row + across, mask=seen[:, None], other=0.0).to(tl.float32)
            decay = tl.load(g + rows * (H * K) + across, mask=seen[:, None], other=0.0)
            middle = 0.5 * tl.sum(tl.where(inside[:, None], decay, 0.0), 0)
            left = tl.exp(_product(upto, decay) - middle[None, :])
            right = tl.trans(key * tl.exp(_product(gap, decay) + middle[None, :]))
            query_factor = tl.rsqrt(tl.sum(query * query, 1) + EPS) * scale
            row_factor = tl.rsqrt(tl.sum(row * row, 1) + EPS)
            key_factor = tl.rsqrt(tl.sum(key * key, 1) + EPS)
            step = tl.load(beta + (begin + mine) * H + head, mask=real, other=0.0)
            place = c * H + head
            tile = place * BT * BT + mine[:, None] * BT + token[None, :]
            with_key = _product(row * left, right) * (step * row_factor)[:, None] * key_factor[None, :]
            tl.store(coupling + tile, tl.where(token[None, :] < mine[:, None], with_key, 0.0))
            with_query = _product(query * left, right) * query_factor[:, None] * key_factor[None, :]
            tl.store(mixing + tile, tl.where(token[None, :] <= mine[:, None], with_query, 0.0))
            tl.store(factors + place * 2 * BT + mine, query_factor)
            tl.store(factors + place * 2 * BT + BT + mine, row_factor)


@triton.jit
def solve(
    q,
    k,
    v,
    g,
    beta,
    begins,
    counts,
    coupling,
    factors,
    queries,
    keys,
    asks,
    values,
    totals,
    items,
    q_row,
    k_row,
    v_row,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """What one chunk and head (an item, of C * H) needs beside its state, all fp32: queries q e^G, keys
    k e^(G_last - G) and asks X beta k e^G [C, H, BT, K], values X beta v [C, H, BT, V], totals e^G_last
    [C, H, K].

    X is made of inverses of twice the size, from 1 to BT = 2^LEVELS: below the diagonal, the inverse of
    [[a, 0], [b, c]] is -c^-1 b a^-1. A series in powers of M would cancel where keys repeat.
    """
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        head = item % H
        chunk = item // H
        c = chunk.to(tl.int64)
        count = tl.load(counts + c)
        if count > 0:
            begin = tl.load(begins + c)
            place = c * H + head
            token = tl.arange(0, BT)
            real = token < count
            down = token[:, None]
            over = token[None, :]
            weights = tl.load(coupling + place * BT * BT + down * BT + over)
            inverse = tl.where(down == over, 1.0, 0.0) - tl.where(down // 2 == over // 2, weights, 0.0)
            for level in tl.static_range(1, LEVELS):
                joined = (down // (2 << level) == over // (2 << level)) & (down >> level != over >> level)
                below = tl.where(joined, weights, 0.0)
                inverse -= _product(_product(inverse, below), inverse)
            step = tl.load(beta + (begin + token) * H + head, mask=real, other=0.0)
            query_factor = tl.load(factors + place * 2 * BT + token)
            key_factor = tl.load(factors + place * 2 * BT + BT + token)
            before = tl.where(over <= down, 1.0, 0.0)
            behind = tl.where(over > down, 1.0, 0.0)
            rows = (begin + token)[:, None]
            wide = tl.arange(0, K)
            deep = head * K + wide[None, :]
            decay = tl.load(g + rows * (H * K) + deep, mask=real[:, None], other=0.0)
            reach = tl.exp(_product(before, decay))
            query = tl.load(q + rows * q_row + deep, mask=real[:, None], other=0.0).to(tl.float32)
            key = tl.load(k + rows * k_row + deep, mask=real[:, None], other=0.0).to(tl.float32)
            key *= key_factor[:, None]
            tile = place * BT * K + down * K + wide[None, :]
            tl.store(queries + tile, query * query_factor[:, None] * reach)
            tl.store(keys + tile, key * tl.exp(_product(behind, decay)))
            tl.store(asks + tile, _product(inverse, key * step[:, None] * reach))
            tl.store(totals + place * K + wide, tl.exp(tl.sum(decay, 0)))
            far = tl.arange(0, BV)[None, :]
            there = real[:, None] & (far < V)
            value = tl.load(v + rows * v_row + head * V + far, mask=there, other=0.0).to(tl.float32)
            value = _product(inverse, value * step[:, None])
            tl.store(values + place * BT * V + down * V + far, value, mask=far < V)


@triton.jit
def walk(
    queries,
    keys,
    asks,
    values,
    totals,
    mixing,
    begins,
    counts,
    firsts,
    pool,
    slots,
    fresh,
    track_slots,
    out,
    items,
    pool_slot,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
):
    """A state's tile [BV, K] over its request's chunks an item (N * H * tiles of V), from and to the pool.

    firsts [2 N + 1]: chunks firsts[2 n] .. firsts[2 n + 2] are request n's; the state before firsts[2 n + 1]
    also goes to track_slots[n], if that is a slot. fresh [N] u8. out [T, H, V]; the rest as `solve` left it.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile = item % TILES
        head = (item // TILES) % H
        request = item // (TILES * H)
        n = request.to(tl.int64)
        slot = tl.load(slots + n)
        if slot >= 0:
            wide = tl.arange(0, K)[None, :]
            down = tile * BV + tl.arange(0, BV)
            token = tl.arange(0, BT)
            inside = down < V
            here = head * V * K + down[:, None] * K + wide
            old = inside[:, None] & (tl.load(fresh + n) == 0)
            state = tl.load(pool + slot * pool_slot + here, mask=old, other=0.0).to(tl.float32)
            begin = tl.load(firsts + 2 * n)
            cut = tl.load(firsts + 2 * n + 1)
            end = tl.load(firsts + 2 * n + 2)
            track = tl.load(track_slots + n)
            # A launch without a slot to keep still forms an address, which must lie in the pool.
            kept = pool + tl.maximum(track, 0) * pool_slot + here
            wanted = inside[:, None] & (track >= 0)
            for turn in range(end - begin):
                c = begin + turn
                tl.store(kept, state.to(pool.dtype.element_ty), mask=wanted & (c == cut))
                place = c * H + head
                rows = place * BT * K + token[:, None] * K + wide
                turned = tl.trans(state)
                u = tl.load(
                    values + place * BT * V + token[:, None] * V + down[None, :],
                    mask=inside[None, :],
                    other=0.0,
                ) - _product(tl.load(asks + rows), turned)
                answer = _product(tl.load(queries + rows), turned)
                square = place * BT * BT + token[:, None] * BT + tl.arange(0, BT)[None, :]
                answer += _product(tl.load(mixing + square), u)
                real = token < tl.load(counts + c)
                target = (tl.load(begins + c) + token) * H + head
                tl.store(
                    out + target[:, None] * V + down[None, :],
                    answer.to(out.dtype.element_ty),
                    mask=real[:, None] & inside[None, :],
                )
                total = tl.load(totals + place * K + tl.arange(0, K))
                state = state * total[None, :] + _product(tl.trans(u), tl.load(keys + rows))
            tl.store(kept, state.to(pool.dtype.element_ty), mask=wanted & (cut == end))
            tl.store(pool + slot * pool_slot + here, state.to(pool.dtype.element_ty), mask=inside[:, None])
