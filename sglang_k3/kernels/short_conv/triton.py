"""Causal depthwise convolution over four tokens, then SiLU, in Triton for Ascend's vector cores.

A program holds the four taps of a block of channels and goes through requests or rows with the last three
rows on the chip, so each row is read once. Windows are read and written in their slots alone. Kernels alone:
launched by ascend_triton.py. Not run on hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

KEPT = tl.constexpr(3)
"""Rows of a window: one fewer than the taps."""


@triton.jit
def _tap(taps, which: tl.constexpr):
    """Column `which` of taps [BC, 4]: loaded in one piece; a strided load would move single values."""
    column = tl.arange(0, 4)
    return tl.sum(tl.where(column[None, :] == which, taps, 0.0), 1)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def decode(
    x,
    weight,
    pool,
    slots,
    y,
    items,
    requests,
    parts,
    x_row,
    pool_slot,
    C: tl.constexpr,
    BC: tl.constexpr,
):
    """One row a request: x [N, C] -> y [N, C]; windows pool [S, 3, C] move on by it. weight [C, 4].

    items = blocks of channels * parts; a part takes every parts-th request.
    """
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        part = item // BLOCKS
        column = (item % BLOCKS) * BC + tl.arange(0, BC)
        inside = column < C
        taps = tl.load(
            weight + column[:, None] * 4 + tl.arange(0, 4)[None, :], mask=inside[:, None], other=0.0
        )
        first, second, third, last = _tap(taps, 0), _tap(taps, 1), _tap(taps, 2), _tap(taps, 3)
        for request in range(part, requests, parts):
            row = request + 0
            n = row.to(tl.int64)
            slot = tl.load(slots + n)
            target = y + n * C + column
            if slot >= 0:
                window = pool + slot * pool_slot + column
                h0 = tl.load(window, mask=inside, other=0.0)
                h1 = tl.load(window + C, mask=inside, other=0.0)
                h2 = tl.load(window + 2 * C, mask=inside, other=0.0)
                new = tl.load(x + n * x_row + column, mask=inside, other=0.0)
                total = h0.to(tl.float32) * first + h1.to(tl.float32) * second
                total += h2.to(tl.float32) * third + new.to(tl.float32) * last
                tl.store(target, _silu(total).to(y.dtype.element_ty), mask=inside)
                tl.store(window, h1, mask=inside)
                tl.store(window + C, h2, mask=inside)
                tl.store(window + 2 * C, new.to(pool.dtype.element_ty), mask=inside)
            else:
                tl.store(target, tl.zeros([BC], y.dtype.element_ty), mask=inside)


@triton.jit
def verify(
    x,
    weight,
    pool,
    slots,
    bounds,
    bank_rows,
    bank,
    y,
    items,
    requests,
    parts,
    tokens,
    x_row,
    pool_slot,
    bank_row,
    C: tl.constexpr,
    BC: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rows bounds[n] .. bounds[n + 1] (at most WIDTH) of each request; windows are only read, and the rows of
    request n go to bank [B, WIDTH, C] at bank_rows[n]. Rows of nobody give zeros. The rest as in `decode`."""
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        part = item // BLOCKS
        column = (item % BLOCKS) * BC + tl.arange(0, BC)
        inside = column < C
        taps = tl.load(
            weight + column[:, None] * 4 + tl.arange(0, 4)[None, :], mask=inside[:, None], other=0.0
        )
        first, second, third, last = _tap(taps, 0), _tap(taps, 1), _tap(taps, 2), _tap(taps, 3)
        for request in range(part, requests, parts):
            row = request + 0
            n = row.to(tl.int64)
            slot = tl.load(slots + n)
            begin = tl.load(bounds + n)
            count = tl.load(bounds + n + 1) - begin
            ours = slot >= 0
            window = pool + tl.maximum(slot, 0) * pool_slot + column
            keep = inside & ours
            h0 = tl.load(window, mask=keep, other=0.0).to(tl.float32)
            h1 = tl.load(window + C, mask=keep, other=0.0).to(tl.float32)
            h2 = tl.load(window + 2 * C, mask=keep, other=0.0).to(tl.float32)
            kept = bank + tl.load(bank_rows + n) * bank_row + column
            for i in range(WIDTH):
                lives = inside & (i < count)
                new = tl.load(x + (begin + i) * x_row + column, mask=lives & ours, other=0.0)
                total = h0 * first + h1 * second + h2 * third + new.to(tl.float32) * last
                # Nothing was loaded for a request without a slot, and SiLU of 0 is 0.
                tl.store(y + (begin + i) * C + column, _silu(total).to(y.dtype.element_ty), mask=lives)
                tl.store(kept + i * C, new.to(bank.dtype.element_ty), mask=lives & ours)
                h0 = h1
                h1 = h2
                h2 = new.to(tl.float32)
        end = tl.load(bounds + requests)
        for padding in range(end + part, tokens, parts):
            tl.store(y + padding * C + column, tl.zeros([BC], y.dtype.element_ty), mask=inside)


@triton.jit
def extend(
    x,
    weight,
    pool,
    slots,
    fresh,
    requests_of,
    places,
    y,
    items,
    tokens,
    x_row,
    pool_slot,
    C: tl.constexpr,
    BC: tl.constexpr,
    BT: tl.constexpr,
):
    """y [T, C] of packed rows x [T, C]; requests_of [T] names each row's request (-1: nobody's) and places
    [T] its place in it. items = blocks of channels * chunks of BT rows. Windows are only read."""
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        chunk = item // BLOCKS
        start = chunk.to(tl.int64) * BT
        column = (item % BLOCKS) * BC + tl.arange(0, BC)
        inside = column < C
        taps = tl.load(
            weight + column[:, None] * 4 + tl.arange(0, 4)[None, :], mask=inside[:, None], other=0.0
        )
        first, second, third, last = _tap(taps, 0), _tap(taps, 1), _tap(taps, 2), _tap(taps, 3)
        h0 = tl.zeros([BC], tl.float32)
        h1 = tl.zeros([BC], tl.float32)
        h2 = tl.zeros([BC], tl.float32)
        for i in range(BT):
            t = start + i
            n = tl.load(requests_of + t, mask=t < tokens, other=-1)
            ours = n >= 0
            place = tl.load(places + t, mask=ours, other=0)
            if (place == 0) | (i == 0):
                # A request begins here, or the chunk does: what lies before comes from memory.
                slot = tl.load(slots + n, mask=ours, other=0)
                blank = tl.load(fresh + n, mask=ours, other=1) != 0
                window = pool + slot * pool_slot + column
                rows = x + (t - place) * x_row + column
                h0 = _behind(window, rows, place - 3, x_row, C, inside & ours, blank)
                h1 = _behind(window, rows, place - 2, x_row, C, inside & ours, blank)
                h2 = _behind(window, rows, place - 1, x_row, C, inside & ours, blank)
            new = tl.load(x + t * x_row + column, mask=inside & ours, other=0.0).to(tl.float32)
            total = h0 * first + h1 * second + h2 * third + new * last
            answer = tl.where(ours, _silu(total), 0.0)
            tl.store(y + t * C + column, answer.to(y.dtype.element_ty), mask=inside & (t < tokens))
            h0 = h1
            h1 = h2
            h2 = new


@triton.jit
def _behind(window, rows, place, row, C: tl.constexpr, wanted, blank):
    """Row `place` of a request in fp32; below 0 it lies in the window, or is zero where that is blank."""
    older = tl.load(window + (place + KEPT) * C, mask=wanted & (place < 0) & (blank == 0), other=0.0)
    newer = tl.load(rows + place * row, mask=wanted & (place >= 0), other=0.0)
    return tl.where(place < 0, older.to(tl.float32), newer.to(tl.float32))


@triton.jit
def windows(
    pools,
    slots,
    fresh,
    rows,
    firsts,
    counts,
    track_pools,
    track_offsets,
    track_slots,
    items,
    requests,
    pool_layer,
    pool_slot,
    track_layer,
    track_slot,
    rows_layer,
    rows_first,
    rows_row,
    C: tl.constexpr,
    BC: tl.constexpr,
    FRESH: tl.constexpr,
    TRACK: tl.constexpr,
):
    """The windows behind counts[n] rows, in every layer; rows of request n begin at firsts[n] * rows_first.

    pools [L, S, 3, C], track_pools the same or other pools, which take the window behind track_offsets[n]
    rows. FRESH: of a prefill, where a window may be blank and a request without rows still clears it;
    otherwise a request with counts[n] = 0 writes nothing.
    """
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        column = (item % BLOCKS) * BC + tl.arange(0, BC)
        inside = column < C
        request = (item // BLOCKS) % requests
        n = request.to(tl.int64)
        which = item // (BLOCKS * requests)
        layer = which.to(tl.int64)
        slot = tl.load(slots + n)
        count = tl.load(counts + n)
        if FRESH:
            blank = tl.load(fresh + n) != 0
            works = slot >= 0
        else:
            blank = slot < -1
            works = (slot >= 0) & (count > 0)
        if works:
            window = pools + layer * pool_layer + slot * pool_slot + column
            new = rows + layer * rows_layer + tl.load(firsts + n) * rows_first + column
            a0 = _behind(window, new, count - 3, rows_row, C, inside, blank)
            a1 = _behind(window, new, count - 2, rows_row, C, inside, blank)
            a2 = _behind(window, new, count - 1, rows_row, C, inside, blank)
            if TRACK:
                offset = tl.load(track_offsets + n)
                place = tl.load(track_slots + n)
                wanted = inside & (place >= 0) & (offset >= 0) & (offset <= count)
                b0 = _behind(window, new, offset - 3, rows_row, C, wanted, blank)
                b1 = _behind(window, new, offset - 2, rows_row, C, wanted, blank)
                b2 = _behind(window, new, offset - 1, rows_row, C, wanted, blank)
                kept = track_pools + layer * track_layer + tl.maximum(place, 0) * track_slot + column
                tl.store(kept, b0.to(track_pools.dtype.element_ty), mask=wanted)
                tl.store(kept + C, b1.to(track_pools.dtype.element_ty), mask=wanted)
                tl.store(kept + 2 * C, b2.to(track_pools.dtype.element_ty), mask=wanted)
            tl.store(window, a0.to(pools.dtype.element_ty), mask=inside)
            tl.store(window + C, a1.to(pools.dtype.element_ty), mask=inside)
            tl.store(window + 2 * C, a2.to(pools.dtype.element_ty), mask=inside)
