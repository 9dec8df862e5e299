"""What the chunked KDA prefill does row by row on a CPU; chunk_cpu.py does the matrix products between.

Inside a chunk, the weight of token j in token i is a product of decays over (j, i]. These are always built as
running products of decays (each <= 1), never as e^G e^-G, so nothing overflows whatever the gates are.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from sglang_k3.kernels.kda.reference import NORM_EPS
from sglang_k3.kernels.row_math import dot, exp

CHUNK = 64
BLOCK = 16  # rows of a diagonal block, summed pair by pair; blocks below it are matrix products
BLOCKS_BELOW = CHUNK // BLOCK - 1

_EPS = np.float32(NORM_EPS)
_ZERO = np.float32(0)
_ONE = np.float32(1)
# A past token that has decayed to this weight is 8 digits below fp32's last place. Without a floor the factors
# become subnormal, and matrix products of subnormals run 20 times slower.
_NEGLIGIBLE = np.float32(2.0**-50)


@njit(cache=True, nogil=True, error_model="numpy")
def _scaled(row, factor, out) -> None:
    for i in range(row.shape[0]):
        out[i] = row[i] * factor


@njit(cache=True, nogil=True, error_model="numpy")
def _times(a, b, out) -> None:
    for i in range(a.shape[0]):
        out[i] = a[i] * b[i]


@njit(cache=True, nogil=True, error_model="numpy")
def _decay(product, decay) -> None:
    """product *= decay, in place, but 0 once it is negligible."""
    for i in range(product.shape[0]):
        p = product[i] * decay[i]
        product[i] = p if p > _NEGLIGIBLE else _ZERO


@njit(cache=True, nogil=True, error_model="numpy")
def _subtract(factor, row, out) -> None:
    for i in range(row.shape[0]):
        out[i] -= factor * row[i]


@njit(cache=True, nogil=True, error_model="numpy")
def _decayed_before(k, decay, end, out) -> None:
    """out[j] = k[j] times the decays over (j, end), for j < end."""
    product = np.ones(k.shape[1], np.float32)
    for back in range(end):
        j = end - 1 - back
        _times(k[j], product, out[j])
        _decay(product, decay[j])


@njit(cache=True, nogil=True, error_model="numpy")
def _diagonal_block(q, k, decay, beta, start, end, coupling, mixing) -> None:
    """Within rows start..end: coupling[i, j - start] = M_ij for j < i, mixing[i, j] = A_ij for j <= i."""
    product = np.empty(k.shape[1], np.float32)
    weight = np.empty(k.shape[1], np.float32)
    for j in range(start, end):
        product[:] = _ONE
        mixing[j, j] = dot(q[j], k[j])
        for i in range(j + 1, end):
            _decay(product, decay[i])
            _times(k[j], product, weight)
            coupling[i, j - start] = beta[i] * dot(k[i], weight)
            mixing[i, j] = dot(q[i], weight)


@njit(cache=True, nogil=True, error_model="numpy")
def _factor_chunk(q, k, decay, beta, count, from_state, tail, total, left, right, coupling, mixing) -> None:
    """`factor_chunks` for one chunk of one head; q, k normalised and q scaled, each [CHUNK, K]."""
    product = np.ones(k.shape[1], np.float32)
    for i in range(count):
        _decay(product, decay[i])
        _times(k[i], product, from_state[i])
        _scaled(from_state[i], -beta[i], from_state[i])
        _times(q[i], product, from_state[CHUNK + i])
    total[:] = product
    _decayed_before(k, decay, count, tail)
    for start in range(0, count, BLOCK):
        end = min(start + BLOCK, count)
        _diagonal_block(q, k, decay, beta, start, end, coupling, mixing)
        if start == 0:
            continue
        below = start // BLOCK - 1
        _decayed_before(k, decay, start, right[below])
        product[:] = _ONE
        for i in range(start, end):
            _decay(product, decay[i])
            _times(k[i], product, left[below, i - start])
            _scaled(left[below, i - start], beta[i], left[below, i - start])
            _times(q[i], product, left[below, BLOCK + i - start])


@njit(cache=True, nogil=True, error_model="numpy", parallel=True)
def factor_chunks(
    q, k, v, g, beta, scale, begins, counts, from_state, values, tail, total, left, right, coupling, mixing
) -> None:
    """Everything of B = chunks * H chunk-heads that is linear in a row or stays within a diagonal block.

    In: q, k, g [T, H, K], v [T, H, V], beta [T, H] fp32; begins, counts [chunks], a chunk's tokens.
    Out, for chunk-head b = chunk * H + head (rows from count on are zero):
        from_state [B, 2 CHUNK, K]: -beta k d, then q d, where d are the decays over the chunk up to the row
        values [B, CHUNK, V]: beta v
        tail [B, CHUNK, K]: k times the decays after the row, to the chunk's end
        total [B, K]: the decays over the chunk
        left [B, BLOCKS_BELOW, 2 BLOCK, K], right [B, BLOCKS_BELOW, CHUNK - BLOCK, K]: left . right^T holds M
            (first BLOCK rows) and A (the others) of row block n + 1 against all rows before that block
        coupling [B, CHUNK, BLOCK]: M within diagonal blocks; mixing [B, CHUNK, CHUNK]: A within them
    """
    heads, width = q.shape[1], q.shape[2]
    for b in prange(counts.shape[0] * heads):
        h = b % heads
        begin, count = begins[b // heads], counts[b // heads]
        rows = np.empty((3, CHUNK, width), np.float32)
        queries, keys, decay = rows[0], rows[1], rows[2]
        steps = np.empty(CHUNK, np.float32)
        from_state[b] = _ZERO
        values[b] = _ZERO
        tail[b] = _ZERO
        left[b] = _ZERO
        right[b] = _ZERO
        mixing[b] = _ZERO
        for i in range(count):
            t = begin + i
            steps[i] = beta[t, h]
            _scaled(q[t, h], scale * (_ONE / math.sqrt(dot(q[t, h], q[t, h]) + _EPS)), queries[i])
            _scaled(k[t, h], _ONE / math.sqrt(dot(k[t, h], k[t, h]) + _EPS), keys[i])
            for c in range(width):
                decay[i, c] = exp(g[t, h, c])
            _scaled(v[t, h], steps[i], values[b, i])
        _factor_chunk(
            queries,
            keys,
            decay,
            steps,
            count,
            from_state[b],
            tail[b],
            total[b],
            left[b],
            right[b],
            coupling[b],
            mixing[b],
        )


@njit(cache=True, nogil=True, error_model="numpy", parallel=True)
def solve_chunks(below, coupling, counts, heads, from_state, values, mixing) -> None:
    """Forward substitution with I + M, in place on the first CHUNK rows of from_state and on values; and A's
    blocks below the diagonal put in place.

    below [B, BLOCKS_BELOW, 2 BLOCK, CHUNK - BLOCK] = left . right^T; the rest as in `factor_chunks`.
    """
    for b in prange(counts.shape[0] * heads):
        for i in range(counts[b // heads]):
            block = i // BLOCK
            start = block * BLOCK
            for j in range(start):
                weight = below[b, block - 1, i - start, j]
                if abs(weight) > _NEGLIGIBLE:
                    _subtract(weight, from_state[b, j], from_state[b, i])
                    _subtract(weight, values[b, j], values[b, i])
                mixing[b, i, j] = below[b, block - 1, BLOCK + i - start, j]
            for j in range(start, i):
                weight = coupling[b, i, j - start]
                if abs(weight) > _NEGLIGIBLE:
                    _subtract(weight, from_state[b, j], from_state[b, i])
                    _subtract(weight, values[b, j], values[b, i])


@njit(cache=True, nogil=True, error_model="numpy", parallel=True)
def scatter_chunks(outputs, begins, counts, o) -> None:
    """o [T, H, V]: the chunks' rows of outputs [B, CHUNK, V] go to their tokens."""
    heads = o.shape[1]
    for b in prange(counts.shape[0] * heads):
        for i in range(counts[b // heads]):
            o[begins[b // heads] + i, b % heads] = outputs[b, i]
