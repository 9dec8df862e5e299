"""KDA's verify in Triton for Ascend's cube units: a draft's rows at once, as one product with the state.

What row i reads of the state is its key or query times the decays up to it. So the keys and the queries of
all rows meet the state in one product, recorded tokens that the state lacks (the tail) add a product of their
own, and what is left is a triangular system among the rows: the chunk form of arXiv 2510.26692 for a block as
short as a draft, without writing the state. No exponent is positive, whatever the gates. Sums run in another
order than row by row (triton.py), so bits differ. Not run on hardware.
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
def _of_ring(base, at, row, across, inside, RING: tl.constexpr):
    """Rows `at` [R], 0 .. 2 RING - 1, of a ring that starts at base, as fp32.

    Two accesses of even strides: a remainder would make every row an access of its own.
    """
    low = tl.load(base + at[:, None] * row + across, mask=inside & (at < RING)[:, None], other=0.0)
    high = tl.load(base + (at - RING)[:, None] * row + across, mask=inside & (at >= RING)[:, None], other=0.0)
    return low.to(tl.float32) + high.to(tl.float32)


@triton.jit
def _to_ring(base, at, row, across, inside, values, RING: tl.constexpr):
    tl.store(base + at[:, None] * row + across, values, mask=inside & (at < RING)[:, None])
    tl.store(base + (at - RING)[:, None] * row + across, values, mask=inside & (at >= RING)[:, None])


@triton.jit
def verify_block(
    q,
    k,
    v,
    g,
    beta,
    pool,
    slots,
    bounds,
    bank_rows,
    bank_u,
    bank_k,
    bank_g,
    starts,
    tails,
    folds,
    out,
    scale,
    items,
    q_row,
    k_row,
    v_row,
    pool_slot,
    u_bank,
    k_bank,
    g_bank,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    LEVELS: tl.constexpr,
    TAIL: tl.constexpr,
):
    """The arguments of `triton.verify`; an item is a request, a head and a tile of V.

    Tiles of rows [2 HALF, ...] hold the keys' rows first and then the queries', so that WIDTH <= HALF = 8 =
    2^LEVELS rows fill a cube unit's 16. TAIL: recorded tokens at most, 0 or a power of two from 16 on.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile = item % TILES
        head = (item // TILES) % H
        request = item // (TILES * H)
        n = request.to(tl.int64)
        slot = tl.load(slots + n)
        if slot >= 0:
            across = tl.arange(0, K)[None, :]
            down = tile * BV + tl.arange(0, BV)
            inside = down[None, :] < V
            here = head * V * K + down[:, None] * K + across
            held = down[:, None] < V
            state = tl.load(pool + slot * pool_slot + here, mask=held, other=0.0).to(tl.float32)
            bank = tl.load(bank_rows + n)
            us = bank_u + bank * u_bank + head * V
            ks = bank_k + bank * k_bank + head * K
            gs = bank_g + bank * g_bank + head * K
            first = tl.load(bounds + n)
            count = tl.load(bounds + n + 1) - first
            start = tl.load(starts + n)
            tail = tl.load(tails + n)

            row = tl.arange(0, 2 * HALF)
            place = row % HALF
            keyed = (row < HALF) & (place < count)
            asking = (row >= HALF) & (place < count)
            token = (first + place)[:, None]
            raw_key = tl.load(k + token * k_row + head * K + across, mask=keyed[:, None], other=0.0)
            query = tl.load(q + token * q_row + head * K + across, mask=asking[:, None], other=0.0)
            log_decay = tl.load(g + (token * H + head) * K + across, mask=keyed[:, None], other=0.0)
            step = tl.load(beta + (first + place) * H + head, mask=keyed, other=0.0)
            rows = raw_key.to(tl.float32) + query.to(tl.float32)
            size = tl.rsqrt(tl.sum(rows * rows, 1) + EPS) * tl.where(row < HALF, 1.0, scale)
            rows *= size[:, None]
            upto = tl.where((row[None, :] < HALF) & (row[None, :] <= place[:, None]), 1.0, 0.0)
            reach = rows * tl.exp(_product(upto, log_decay))

            # How each row's key or query meets the key of row j, last j first: the decays between them grow
            # by one token a turn, and no difference of long sums is taken.
            weights = tl.zeros([2 * HALF, 2 * HALF], tl.float32)
            since = tl.zeros([2 * HALF, K], tl.float32)
            for back in tl.static_range(WIDTH):
                j = WIDTH - 1 - back
                mine = (row == j)[:, None]
                key = tl.sum(tl.where(mine, rows, 0.0), 0)
                met = tl.sum(rows * key[None, :] * tl.exp(since), 1)
                weights = tl.where(row[None, :] == j, met[:, None], weights)
                own = tl.sum(tl.where(mine, log_decay, 0.0), 0)
                since += tl.where((place >= j)[:, None], own[None, :], 0.0)

            if TAIL > 0:
                record = tl.arange(0, TAIL)
                lives = (record < tail)[:, None]
                at = start + record
                old = _of_ring(ks, at, H * K, across, lives, RING)
                old *= tl.rsqrt(tl.sum(old * old, 1) + EPS)[:, None]
                decay = _of_ring(gs, at, H * K, across, lives, RING)
                factors = _of_ring(us, at, H * V, down[None, :], lives & inside, RING)
                behind = tl.where(record[None, :] > record[:, None], 1.0, 0.0)
                old *= tl.exp(_product(behind, decay))
                total = tl.exp(tl.sum(decay, 0))[None, :]
                seen = _product(reach * total, tl.trans(state))
                seen += _product(_product(reach, tl.trans(old)), factors)
                fold = tl.load(folds + n)
                if fold >= 0:
                    folded = state * total + _product(tl.trans(factors), old)
                    tl.store(pool + fold * pool_slot + here, folded.to(pool.dtype.element_ty), mask=held)
            else:
                seen = _product(reach, tl.trans(state))

            value = tl.load(
                v + token * v_row + head * V + down[None, :], mask=keyed[:, None] & inside, other=0.0
            ).to(tl.float32)
            error = tl.where(keyed[:, None], step[:, None] * (value - seen), 0.0)
            over = row[None, :]
            coupling = tl.where(over < row[:, None], weights * step[:, None], 0.0)
            inverse = tl.where(over == row[:, None], 1.0, 0.0)
            inverse -= tl.where(over // 2 == row[:, None] // 2, coupling, 0.0)
            for level in tl.static_range(1, LEVELS):
                joined = over // (2 << level) == row[:, None] // (2 << level)
                below = tl.where(joined & (over >> level != row[:, None] >> level), coupling, 0.0)
                inverse -= _product(_product(inverse, below), inverse)
            u = _product(inverse, error)
            mixing = tl.where((row >= HALF)[:, None] & (over <= place[:, None]), weights, 0.0)
            answer = seen + _product(mixing, u)
            target = out + (token * H + head) * V + down[None, :]
            tl.store(target, answer.to(out.dtype.element_ty), mask=asking[:, None] & inside)
            at = start + tail + place
            _to_ring(us, at, H * V, down[None, :], keyed[:, None] & inside, u, RING)
            # The key and the decay are the head's: its first tile writes them.
            once = keyed[:, None] & (tile == 0)
            _to_ring(ks, at, H * K, across, once, raw_key.to(bank_k.dtype.element_ty), RING)
            _to_ring(gs, at, H * K, across, once, log_decay, RING)
