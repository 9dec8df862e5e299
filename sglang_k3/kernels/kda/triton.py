"""Kimi Delta Attention in Triton for Ascend's vector cores: decode, verify with records, commit.

One program a core walks over items (layer, request, head, tile of V). A tile [BV, K] of a state is read once,
stays on the chip for all rows and is written once, and each row goes through `_step`, so a replayed record
gives the bits that decode gave. Kernels alone: arguments are checked and launched by ascend_triton.py.
Not run on hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)
"""reference.NORM_EPS; a kernel may read a constexpr of its module alone."""


@triton.jit
def _unit(x):
    """x [K] fp32 to unit length."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + EPS)


@triton.jit
def _step(state, key, decay, u):
    """A state's tile [BV, K] behind one token: key, decay [K], u [BV]."""
    return state * decay[None, :] + u[:, None] * key[None, :]


@triton.jit
def _error(state, key, decay, value, beta):
    """u [BV] of a new token: what its value has that the decayed state does not give for its key."""
    return beta * (value - tl.sum(state * decay[None, :] * key[None, :], 1))


@triton.jit
def _rounded(state, pool):
    """The state as the pool would keep it, in fp32 again."""
    return state.to(pool.dtype.element_ty).to(tl.float32)


@triton.jit
def decode(
    q,
    k,
    v,
    g,
    beta,
    pool,
    slots,
    out,
    scale,
    items,
    q_row,
    k_row,
    v_row,
    pool_slot,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
):
    """One token a request: q, k [N, H, K], v [N, H, V] with row strides q_row, k_row, v_row; g [N, H, K],
    beta [N, H], out [N, H, V] packed; pool [S, H, V, K] with slot stride pool_slot; items = N * H * tiles."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    cores = tl.num_programs(0)
    for item in range(tl.program_id(0), items, cores):
        tile = item % TILES
        head = (item // TILES) % H
        request = item // (TILES * H)
        n = request.to(tl.int64)
        across = tl.arange(0, K)
        down = tile * BV + tl.arange(0, BV)
        inside = down < V
        slot = tl.load(slots + n)
        target = out + (n * H + head) * V + down
        if slot >= 0:
            place = pool + slot * pool_slot + head * V * K + down[:, None] * K + across[None, :]
            state = tl.load(place, mask=inside[:, None], other=0.0).to(tl.float32)
            query = _unit(tl.load(q + n * q_row + head * K + across).to(tl.float32)) * scale
            key = _unit(tl.load(k + n * k_row + head * K + across).to(tl.float32))
            decay = tl.exp(tl.load(g + (n * H + head) * K + across))
            value = tl.load(v + n * v_row + head * V + down, mask=inside, other=0.0).to(tl.float32)
            u = _error(state, key, decay, value, tl.load(beta + n * H + head))
            state = _step(state, key, decay, u)
            answer = tl.sum(state * query[None, :], 1)
            tl.store(place, state.to(pool.dtype.element_ty), mask=inside[:, None])
            tl.store(target, answer.to(out.dtype.element_ty), mask=inside)
        else:
            tl.store(target, tl.zeros([BV], out.dtype.element_ty), mask=inside)


@triton.jit
def verify(
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
    TAIL: tl.constexpr,
):
    """Rows bounds[n] .. bounds[n + 1] (at most WIDTH) of each request behind its tail (at most TAIL).

    Banks [B, RING, H, ...] with row strides u_bank, k_bank, g_bank; the rest as in `decode`. A tail's state
    goes to slot folds[n], if any; no other state is written. Rows of padding are left to the launcher.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    cores = tl.num_programs(0)
    for item in range(tl.program_id(0), items, cores):
        tile = item % TILES
        head = (item // TILES) % H
        request = item // (TILES * H)
        n = request.to(tl.int64)
        across = tl.arange(0, K)
        down = tile * BV + tl.arange(0, BV)
        inside = down < V
        slot = tl.load(slots + n)
        if slot >= 0:
            here = head * V * K + down[:, None] * K + across[None, :]
            state = tl.load(pool + slot * pool_slot + here, mask=inside[:, None], other=0.0).to(tl.float32)
            bank = tl.load(bank_rows + n)
            us = bank_u + bank * u_bank + head * V + down
            ks = bank_k + bank * k_bank + head * K + across
            gs = bank_g + bank * g_bank + head * K + across
            first = tl.load(bounds + n)
            count = tl.load(bounds + n + 1) - first
            start = tl.load(starts + n)
            tail = tl.load(tails + n)
            if TAIL > 0:
                for i in range(TAIL):
                    lives = i < tail
                    at = (start + i) % RING
                    key = _unit(tl.load(ks + at * H * K, mask=lives, other=0.0).to(tl.float32))
                    decay = tl.exp(tl.load(gs + at * H * K, mask=lives, other=0.0))
                    u = tl.load(us + at * H * V, mask=inside & lives, other=0.0)
                    state = _rounded(_step(state, key, decay, u), pool)
                fold = tl.load(folds + n)
                # A launch without a slot to fold into still forms an address, which must lie in the pool.
                kept = pool + tl.maximum(fold, 0) * pool_slot + here
                tl.store(kept, state.to(pool.dtype.element_ty), mask=inside[:, None] & (fold >= 0))
            for i in range(WIDTH):
                lives = i < count
                t = first + i
                at = (start + tail + i) % RING
                raw_key = tl.load(k + t * k_row + head * K + across, mask=lives, other=0.0)
                log_decay = tl.load(g + (t * H + head) * K + across, mask=lives, other=0.0)
                row = tl.load(q + t * q_row + head * K + across, mask=lives, other=0.0).to(tl.float32)
                value = tl.load(v + t * v_row + head * V + down, mask=inside & lives, other=0.0).to(
                    tl.float32
                )
                key = _unit(raw_key.to(tl.float32))
                decay = tl.exp(log_decay)
                u = _error(state, key, decay, value, tl.load(beta + t * H + head, mask=lives, other=0.0))
                state = _step(state, key, decay, u)
                answer = tl.sum(state * (_unit(row) * scale)[None, :], 1)
                state = _rounded(state, pool)
                tl.store(
                    out + (t * H + head) * V + down, answer.to(out.dtype.element_ty), mask=inside & lives
                )
                tl.store(us + at * H * V, u, mask=inside & lives)
                # The key and the decay are the head's: its first tile writes them.
                once = lives & (tile == 0)
                tl.store(ks + at * H * K, raw_key.to(bank_k.dtype.element_ty), mask=once)
                tl.store(gs + at * H * K, log_decay, mask=once)


@triton.jit
def commit(
    pools,
    slots,
    targets,
    bank_rows,
    bank_u,
    bank_k,
    bank_g,
    starts,
    counts,
    track_offsets,
    track_slots,
    items,
    requests,
    pool_layer,
    pool_slot,
    u_layer,
    k_layer,
    g_layer,
    u_bank,
    k_bank,
    g_bank,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    RING: tl.constexpr,
    STEPS: tl.constexpr,
    TRACK: tl.constexpr,
):
    """counts[n] (at most STEPS) recorded tokens enter each layer's state: slot slots[n] -> targets[n].

    pools [L, S, H, V, K], banks [L, B, RING, H, ...] with the strides given; items = L * requests * H * tiles
    of V. TRACK: the state behind track_offsets[n] tokens also goes to track_slots[n].
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    cores = tl.num_programs(0)
    for item in range(tl.program_id(0), items, cores):
        tile = item % TILES
        head = (item // TILES) % H
        n = (item // (TILES * H)) % requests
        row = item // (TILES * H * requests)
        layer = row.to(tl.int64)
        across = tl.arange(0, K)
        down = tile * BV + tl.arange(0, BV)
        inside = down < V
        slot = tl.load(slots + n)
        count = tl.load(counts + n)
        if (slot >= 0) & (count > 0):
            here = layer * pool_layer + head * V * K + down[:, None] * K + across[None, :]
            state = tl.load(pools + slot * pool_slot + here, mask=inside[:, None], other=0.0).to(tl.float32)
            bank = tl.load(bank_rows + n)
            start = tl.load(starts + n)
            us = bank_u + layer * u_layer + bank * u_bank + head * V + down
            ks = bank_k + layer * k_layer + bank * k_bank + head * K + across
            gs = bank_g + layer * g_layer + bank * g_bank + head * K + across
            if TRACK:
                track = tl.load(track_slots + n)
                offset = tl.load(track_offsets + n)
                wanted = (track >= 0) & (offset <= count)
                kept = pools + tl.maximum(track, 0) * pool_slot + here
                tl.store(
                    kept, state.to(pools.dtype.element_ty), mask=inside[:, None] & wanted & (offset == 0)
                )
            for i in range(STEPS):
                lives = i < count
                at = (start + i) % RING
                key = _unit(tl.load(ks + at * H * K, mask=lives, other=0.0).to(tl.float32))
                decay = tl.exp(tl.load(gs + at * H * K, mask=lives, other=0.0))
                u = tl.load(us + at * H * V, mask=inside & lives, other=0.0)
                state = _rounded(_step(state, key, decay, u), pools)
                if TRACK:
                    tl.store(
                        kept,
                        state.to(pools.dtype.element_ty),
                        mask=inside[:, None] & wanted & (offset == i + 1),
                    )
            target = tl.load(targets + n)
            tl.store(
                pools + target * pool_slot + here, state.to(pools.dtype.element_ty), mask=inside[:, None]
            )
