"""Absorbed latent attention over pages, in Triton for Ascend: lengths and tables stay on the device.

A request's keys are dealt to parts, so that a batch of one fills the cores. `attend` goes over a part's
blocks with an online softmax, products on the cube units; `join` weighs the parts. Kernels alone: launched by
ascend_triton.py. Not run on hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)
"""Below every score; finite, because infinity less itself is not a number."""


@triton.jit
def attend(
    q,
    values,
    ropes,
    table,
    table_rows,
    bounds,
    prefixes,
    mixed,
    tops,
    totals,
    scale,
    items,
    q_row,
    table_row,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """TOKENS rows of one request against every PARTS-th block of KEYS positions an item (N * GROUPS * PARTS).

    q [T, H, L + R] with row stride q_row; values [S, L], ropes [S, R]; KEYS positions from a multiple of KEYS
    on stand in neighbouring slots: a page holds a multiple of them. TOKENS * H (token, head) pairs are padded
    to ROWS. mixed [items, ROWS, L], tops, totals [items, ROWS] fp32.
    """
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        part = item % PARTS
        group = (item // PARTS) % GROUPS
        request = item // (PARTS * GROUPS)
        n = request.to(tl.int64)
        which = item + 0
        spot = which.to(tl.int64) * ROWS
        first = tl.load(bounds + n)
        count = tl.load(bounds + n + 1) - first
        prefix = tl.load(prefixes + n)
        line = table + tl.load(table_rows + n) * table_row
        pair = tl.arange(0, ROWS)
        place = group * TOKENS + pair // H
        deep = tl.arange(0, L)
        wide = tl.arange(0, R)
        near = tl.arange(0, KEYS)
        real = (place < count) & (pair < TOKENS * H)
        rows = q + first * q_row + (place * q_row + (pair % H) * (L + R))[:, None]
        query = tl.load(rows + deep[None, :], mask=real[:, None], other=0.0)
        turn = tl.load(rows + L + wide[None, :], mask=real[:, None], other=0.0)
        last = prefix + place
        top = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        answer = tl.zeros([ROWS, L], tl.float32)
        blocks = (prefix + count + KEYS - 1) // KEYS
        for turnus in range((blocks - part + PARTS - 1) // PARTS):
            begin = (part + turnus * PARTS) * KEYS
            position = begin + near
            written = position < prefix + count
            slot = tl.load(line + begin).to(tl.int64)
            value = tl.load(
                values + slot * L + near[:, None] * L + deep[None, :], mask=written[:, None], other=0.0
            )
            rope = tl.load(
                ropes + slot * R + near[:, None] * R + wide[None, :], mask=written[:, None], other=0.0
            )
            scores = tl.dot(query, tl.trans(value), input_precision="ieee")
            scores += tl.dot(turn, tl.trans(rope), input_precision="ieee")
            seen = position[None, :] <= last[:, None]
            scores = tl.where(seen, scores * scale, LOWEST)
            higher = tl.maximum(top, tl.max(scores, 1))
            keep = tl.exp(top - higher)
            share = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
            total = total * keep + tl.sum(share, 1)
            answer = answer * keep[:, None] + tl.dot(
                share.to(values.dtype.element_ty), value, input_precision="ieee"
            )
            top = higher
        tl.store(mixed + spot * L + pair[:, None] * L + deep[None, :], answer)
        tl.store(tops + spot + pair, top)
        tl.store(totals + spot + pair, total)


@triton.jit
def join(
    mixed,
    tops,
    totals,
    bounds,
    out,
    items,
    H: tl.constexpr,
    L: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """out [T, H, L] from `attend`'s parts; an item is one (token, head) pair: N * GROUPS * TOKENS * H."""
    deep = tl.arange(0, L)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        pair = item % (TOKENS * H)
        group = (item // (TOKENS * H)) % GROUPS
        request = item // (TOKENS * H * GROUPS)
        n = request.to(tl.int64)
        place = group * TOKENS + pair // H
        first = tl.load(bounds + n)
        count = tl.load(bounds + n + 1) - first
        if place < count:
            spot = (n * GROUPS + group) * PARTS * ROWS + pair
            top = tl.load(tops + spot)
            total = tl.load(totals + spot)
            answer = tl.load(mixed + spot * L + deep)
            for part in range(1, PARTS):
                at = spot + part * ROWS
                other = tl.load(tops + at)
                higher = tl.maximum(top, other)
                keep = tl.exp(top - higher)
                share = tl.exp(other - higher)
                total = total * keep + tl.load(totals + at) * share
                answer = answer * keep + tl.load(mixed + at * L + deep) * share
                top = higher
            target = out + ((first + place) * H + pair % H) * L + deep
            tl.store(target, (answer / total).to(out.dtype.element_ty))
