"""Paged latent attention one token and one head at a time, in a fixed order over absolute positions."""

from __future__ import annotations

import numpy as np
from numba import njit

from sglang_k3.kernels.row_math import LANES, dot, exp, fma, widen
from sglang_k3.kernels.row_vectors import ROWS, add_rows, dots

# Positions scored before the running maximum moves. Part of the definition: blocks start at multiples
# of it, so a token's arithmetic is the same in whatever chunk it arrives.
KEYS = 32
# Heads that share a gathered block of keys. Any value gives the same bits.
HEADS = 4
_ZERO = np.float32(0)


@njit(cache=True, nogil=True, error_model="numpy")
def _score(keys, count, first, second, scale, scores) -> None:
    """scores [2, KEYS] = scale keys [KEYS, D] . (first, second) [D], each sum in `row_math.dot`'s order."""
    width = keys.shape[1]
    whole = width - width % LANES
    # Rows behind `count` are scored too, where a group of ROWS reaches over the end; nobody reads that.
    for j in range(0, count, ROWS):
        a0, b0, a1, b1, a2, b2, a3, b3 = dots(keys, j, width, first, second, whole)
        for d in range(whole, width):
            a0 = fma(keys[j, d], first[d], a0)
            b0 = fma(keys[j, d], second[d], b0)
            a1 = fma(keys[j + 1, d], first[d], a1)
            b1 = fma(keys[j + 1, d], second[d], b1)
            a2 = fma(keys[j + 2, d], first[d], a2)
            b2 = fma(keys[j + 2, d], second[d], b2)
            a3 = fma(keys[j + 3, d], first[d], a3)
            b3 = fma(keys[j + 3, d], second[d], b3)
        scores[0, j] = a0 * scale
        scores[0, j + 1] = a1 * scale
        scores[0, j + 2] = a2 * scale
        scores[0, j + 3] = a3 * scale
        scores[1, j] = b0 * scale
        scores[1, j + 1] = b1 * scale
        scores[1, j + 2] = b2 * scale
        scores[1, j + 3] = b3 * scale


@njit(cache=True, nogil=True, error_model="numpy")
def _score_one(keys, count, query, scale, scores) -> None:
    for j in range(count):
        scores[j] = dot(query, keys[j]) * scale


@njit(cache=True, nogil=True, error_model="numpy")
def _blend(keys, count, scores, top, total, row):
    """One block into a head's row [L] = sum of exp(score - top) value; returns the new (top, total)."""
    width = keys.shape[1]
    latent = row.shape[0]
    whole = latent - latent % LANES
    new_top = top
    for j in range(count):
        new_top = np.float32(max(new_top, scores[j]))
    kept = exp(top - new_top)
    for d in range(latent):
        row[d] *= kept
    weight = total * kept
    for j in range(count):
        scores[j] = exp(scores[j] - new_top)
        weight += scores[j]
    grouped = count - count % ROWS
    for j in range(0, grouped, ROWS):
        add_rows(row, keys, j, width, (scores[j], scores[j + 1], scores[j + 2], scores[j + 3]), whole)
        for d in range(whole, latent):
            row[d] = fma(scores[j], keys[j, d], row[d])
            row[d] = fma(scores[j + 1], keys[j + 1, d], row[d])
            row[d] = fma(scores[j + 2], keys[j + 2, d], row[d])
            row[d] = fma(scores[j + 3], keys[j + 3, d], row[d])
    for j in range(grouped, count):
        for d in range(latent):
            row[d] = fma(scores[j], keys[j, d], row[d])
    return new_top, weight


@njit(cache=True, nogil=True, error_model="numpy")
def place_rows(cu_seqlens, prefix_lens, request_rows, rows, positions):
    """Table row and position of each token, into rows and positions [>= T]; (T, positions seen in all)."""
    seen = 0
    for n in range(prefix_lens.shape[0]):
        for t in range(cu_seqlens[n], cu_seqlens[n + 1]):
            rows[t] = request_rows[n]
            positions[t] = prefix_lens[n] + t - cu_seqlens[n]
            seen += positions[t] + 1
    return cu_seqlens[prefix_lens.shape[0]], seen


@njit(cache=True, nogil=True, error_model="numpy")
def attend_rows(first, last, q, cache, stride, token_table, table_rows, positions, scale, out) -> None:
    """Items: (token, group of HEADS heads). Token t sees positions 0 .. positions[t] of its table row.

    q [T, H, D] fp32; cache flat, fp32 or bf16 bits, row `slot` at slot * stride; out [T, H, L] fp32 zeros.
    """
    heads, width = q.shape[1], q.shape[2]
    groups = (heads + HEADS - 1) // HEADS
    keys = np.zeros((KEYS, width), np.float32)
    scores = np.empty((HEADS, KEYS), np.float32)
    tops = np.empty(HEADS, np.float32)
    totals = np.empty(HEADS, np.float32)
    for item in range(first, last):
        t = item // groups
        begin = item % groups * HEADS
        end = min(begin + HEADS, heads)
        tops[:] = -np.inf
        totals[:] = _ZERO
        table = token_table[table_rows[t]]
        for block in range(0, positions[t] + 1, KEYS):
            count = min(KEYS, positions[t] + 1 - block)
            for j in range(count):
                start = np.int64(table[block + j]) * stride
                widen(cache[start : start + width], keys[j])
            for h in range(begin, end - 1, 2):
                _score(keys, count, q[t, h], q[t, h + 1], scale, scores[h - begin : h - begin + 2])
            if (end - begin) % 2:
                _score_one(keys, count, q[t, end - 1], scale, scores[end - 1 - begin])
            for h in range(begin, end):
                i = h - begin
                tops[i], totals[i] = _blend(keys, count, scores[i], tops[i], totals[i], out[t, h])
        for h in range(begin, end):
            for d in range(out.shape[2]):
                out[t, h, d] /= totals[h - begin]
