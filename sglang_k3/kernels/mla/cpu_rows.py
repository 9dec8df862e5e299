"""The exact loop of paged latent attention: one token and one head at a time."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from sglang_k3.kernels.row_math import dot, exp

# Positions scored before the running maximum moves. Part of the definition: blocks start at multiples
# of it, so a token's arithmetic is the same in whatever chunk it arrives.
_KEYS = 32
# Heads that share a pass over the keys, which then stay in cache. Any value gives the same bits.
_HEADS = 8
_ZERO = np.float32(0)


@njit(cache=True, nogil=True, error_model="numpy", parallel=True)
def attend_rows(
    q: np.ndarray,
    cache: np.ndarray,
    stride: int,
    token_table: np.ndarray,
    table_rows: np.ndarray,
    positions: np.ndarray,
    scale: np.float32,
    out: np.ndarray,
) -> None:
    """Token t < len(positions) sees positions 0 .. positions[t] of table row table_rows[t].

    q [T, H, D] fp32; cache flat fp32, row `slot` at slot * stride; out [T, H, L] fp32. Rows of q and out
    past len(positions) are neither read nor written.
    """
    heads, width, latent = q.shape[1], q.shape[2], out.shape[2]
    groups = (heads + _HEADS - 1) // _HEADS
    for item in prange(positions.shape[0] * groups):
        t = item // groups
        first_head = item % groups * _HEADS
        last_head = min(first_head + _HEADS, heads)
        seen = positions[t] + 1
        top = np.full(_HEADS, -np.inf, np.float32)
        total = np.zeros(_HEADS, np.float32)
        scores = np.empty(_KEYS, np.float32)
        starts = np.empty(_KEYS, np.int64)
        for block in range(0, seen, _KEYS):
            count = min(_KEYS, seen - block)
            for j in range(count):
                starts[j] = np.int64(token_table[table_rows[t], block + j]) * stride
            for h in range(first_head, last_head):
                old_top = np.float32(top[h - first_head])
                new_top = old_top
                for j in range(count):
                    scores[j] = dot(q[t, h], cache[starts[j] : starts[j] + width]) * scale
                    new_top = np.float32(max(new_top, scores[j]))
                kept = exp(old_top - new_top)
                row = out[t, h]
                for d in range(latent):
                    row[d] *= kept
                weight = total[h - first_head] * kept
                for j in range(count):
                    share = exp(scores[j] - new_top)
                    weight += share
                    value = cache[starts[j] : starts[j] + latent]
                    for d in range(latent):
                        row[d] += share * value[d]
                top[h - first_head] = new_top
                total[h - first_head] = weight
        for h in range(first_head, last_head):
            for d in range(latent):
                out[t, h, d] /= total[h - first_head]
