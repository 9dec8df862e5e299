"""First phase of the attention residual in Triton for Ascend: a bank against all of its readers, as products.

A few tokens of all bank rows meet the readers' key weights on the cube units, columns after columns, so that
a key weight is loaded once for all of them; then each token's softmax weighs its rows in a second product.
Launched by ascend_triton.py. Not run on hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""No score is below it; finite, because infinity less itself is not a number."""


@triton.jit
def block_prepare(
    bank,
    key_weights,
    acc,
    maximum,
    total,
    eps,
    items,
    tokens,
    rows,
    mixes,
    bank_row,
    D: tl.constexpr,
    BC: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    MIXES: tl.constexpr,
):
    """GROUP tokens against MIXES readers an item; items = groups of tokens * tiles of readers, these last.

    bank [rows, tokens, D] with stride bank_row a row, key_weights [mixes, D] fp32 -> acc [mixes, tokens, D],
    maximum, total [mixes, tokens] fp32. rows <= DEPTH and GROUP * DEPTH <= ROWS, a tile's height.
    """
    CHUNKS: tl.constexpr = (D + BC - 1) // BC
    groups = (tokens + GROUP - 1) // GROUP
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        first = (item % groups) * GROUP
        mix = (item // groups) * MIXES + tl.arange(0, MIXES)
        reads = mix < mixes
        m = mix.to(tl.int64)
        pair = tl.arange(0, ROWS)
        which = pair % DEPTH
        token = first + pair // DEPTH
        real = (which < rows) & (pair < GROUP * DEPTH) & (token < tokens)
        spot = bank + which.to(tl.int64) * bank_row + token.to(tl.int64) * D
        scores = tl.zeros([MIXES, ROWS], tl.float32)
        squares = tl.zeros([ROWS], tl.float32)
        for chunk in range(0, CHUNKS):
            column = chunk * BC + tl.arange(0, BC)
            inside = column < D
            row = tl.load(
                spot[:, None] + column[None, :], mask=real[:, None] & inside[None, :], other=0.0
            ).to(tl.float32)
            key = tl.load(
                key_weights + m[:, None] * D + column[None, :],
                mask=reads[:, None] & inside[None, :],
                other=0.0,
            )
            scores += tl.dot(key, tl.trans(row), input_precision="ieee")
            squares += tl.sum(row * row, 1)
        scores = scores * tl.rsqrt(squares / D + eps)[None, :]
        for place in range(0, GROUP):
            own = real & (pair // DEPTH == place)
            there = reads & (first + place < tokens)
            top = tl.max(tl.where(own[None, :], scores, LOWEST), 1)
            share = tl.where(own[None, :], tl.exp(tl.minimum(scores - top[:, None], 0.0)), 0.0)
            out = m * tokens + first + place
            tl.store(maximum + out, top, mask=there)
            tl.store(total + out, tl.sum(share, 1), mask=there)
            for chunk in range(0, CHUNKS):
                column = chunk * BC + tl.arange(0, BC)
                inside = column < D
                row = tl.load(
                    spot[:, None] + column[None, :], mask=own[:, None] & inside[None, :], other=0.0
                ).to(tl.float32)
                mixed = tl.dot(share, row, input_precision="ieee")
                tl.store(
                    acc + out[:, None] * D + column[None, :],
                    mixed,
                    mask=there[:, None] & inside[None, :],
                )
