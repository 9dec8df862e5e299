"""What the chunked KDA prefill does row by row on a CPU; chunk_cpu.py does the matrix products between.

Inside a chunk, the weight of token j in token i is a product of decays over (j, i]. These are always built as
running products of decays (each <= 1), never as e^G e^-G, so nothing overflows whatever the gates are.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from sglang_k3.kernels.kda.reference import NORM_EPS
from sglang_k3.kernels.row_math import dot, exp

CHUNK = 64
BLOCK = 16  # rows of a diagonal block, summed pair by pair; blocks below it are matrix products
BLOCKS_BELOW = CHUNK // BLOCK - 1

_EPS = np.float32(NORM_EPS)
_ZERO = np.float32(0)
_ONE = np.float32(1)
NEGLIGIBLE = np.float32(2.0**-50)
"""A past token that has decayed to this weight is 8 digits below fp32's last place. Without a floor the
factors, and products of two, become subnormal, and matrix products of subnormals can be many times slower."""

# What rows of the solution pass on to each other shrinks further, row by row; ten times slower on its way.
_FADED = np.float32(2.0**-66)


@njit(cache=True, nogil=True, error_model="numpy")
def _fill(value, row) -> None:
    for i in range(row.shape[0]):
        row[i] = value


@njit(cache=True, nogil=True, error_model="numpy")
def _clear(rows) -> None:
    for i in range(rows.shape[0]):
        _fill(_ZERO, rows[i])


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
        product[i] = p if p > NEGLIGIBLE else _ZERO


@njit(cache=True, nogil=True, error_model="numpy")
def _flush(row) -> None:
    """Elements that have faded become 0. NaN stays."""
    for i in range(row.shape[0]):
        row[i] = _ZERO if abs(row[i]) < _FADED else row[i]


@njit(cache=True, nogil=True, error_model="numpy")
def _subtract(factor, row, out) -> None:
    for i in range(row.shape[0]):
        out[i] -= factor * row[i]


@njit(cache=True, nogil=True, error_model="numpy")
def _decayed_before(k, decay, end, out) -> None:
    """out[j] = k[j] times the decays over (j, end), for j < end."""
    product = np.empty(k.shape[1], np.float32)
    _fill(_ONE, product)
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
        _fill(_ONE, product)
        mixing[j, j] = dot(q[j], k[j])
        for i in range(j + 1, end):
            _decay(product, decay[i])
            _times(k[j], product, weight)
            coupling[i, j - start] = beta[i] * dot(k[i], weight)
            mixing[i, j] = dot(q[i], weight)


@njit(cache=True, nogil=True, error_model="numpy")
def _rows_of_head(q, k, v, g, beta, scale, begin, count, h, queries, keys, decay, steps, values) -> None:
    """Head h's rows of the chunk's tokens: q and k normalised, e^g, beta, and beta v."""
    for i in range(count):
        t = begin + i
        steps[i] = beta[t, h]
        _scaled(q[t, h], scale * (_ONE / math.sqrt(dot(q[t, h], q[t, h]) + _EPS)), queries[i])
        _scaled(k[t, h], _ONE / math.sqrt(dot(k[t, h], k[t, h]) + _EPS), keys[i])
        for c in range(decay.shape[1]):
            decay[i, c] = exp(g[t, h, c])
        _scaled(v[t, h], steps[i], values[i])


@njit(cache=True, nogil=True, error_model="numpy")
def _factor_chunk(
    q, k, v, g, beta, scale, begin, count, h, from_state, values, tail, total, left, right, coupling, mixing
) -> None:
    """`factor_chunks` for one chunk-head: tokens begin .. begin + count of head h."""
    _clear(from_state)
    _clear(values)
    _clear(tail)
    _clear(mixing)
    for n in range(BLOCKS_BELOW):
        _clear(left[n])
        _clear(right[n])
    rows = np.empty((3, CHUNK, q.shape[2]), np.float32)
    queries, keys, decay = rows[0], rows[1], rows[2]
    steps = np.empty(CHUNK, np.float32)
    _rows_of_head(q, k, v, g, beta, scale, begin, count, h, queries, keys, decay, steps, values)

    _fill(_ONE, total)
    for i in range(count):
        _decay(total, decay[i])
        _times(keys[i], total, from_state[i])
        _scaled(from_state[i], -steps[i], from_state[i])
        _times(queries[i], total, from_state[CHUNK + i])
    _decayed_before(keys, decay, count, tail)
    product = np.empty(q.shape[2], np.float32)
    for start in range(0, count, BLOCK):
        end = min(start + BLOCK, count)
        _diagonal_block(queries, keys, decay, steps, start, end, coupling, mixing)
        if start == 0:
            continue
        below = start // BLOCK - 1
        _decayed_before(keys, decay, start, right[below])
        _fill(_ONE, product)
        for i in range(start, end):
            _decay(product, decay[i])
            _times(keys[i], product, left[below, i - start])
            _scaled(left[below, i - start], steps[i], left[below, i - start])
            _times(queries[i], product, left[below, BLOCK + i - start])


@njit(cache=True, nogil=True, error_model="numpy")
def factor_chunks(
    first,
    last,
    q,
    k,
    v,
    g,
    beta,
    scale,
    begins,
    counts,
    from_state,
    values,
    tail,
    total,
    left,
    right,
    coupling,
    mixing,
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
    heads = q.shape[1]
    for b in range(first, last):
        _factor_chunk(
            q,
            k,
            v,
            g,
            beta,
            scale,
            begins[b // heads],
            counts[b // heads],
            b % heads,
            from_state[b],
            values[b],
            tail[b],
            total[b],
            left[b],
            right[b],
            coupling[b],
            mixing[b],
        )


@njit(cache=True, nogil=True, error_model="numpy")
def _solve_chunk(below, coupling, count, from_state, values, mixing) -> None:
    for i in range(count):
        block = i // BLOCK
        start = block * BLOCK
        for j in range(i):
            if j < start:
                weight = below[block - 1, i - start, j]
                mixing[i, j] = below[block - 1, BLOCK + i - start, j]
            else:
                weight = coupling[i, j - start]
            if abs(weight) > NEGLIGIBLE:
                _subtract(weight, from_state[j], from_state[i])
                _subtract(weight, values[j], values[i])
        _flush(from_state[i])


@njit(cache=True, nogil=True, error_model="numpy")
def solve_chunks(first, last, below, coupling, counts, heads, from_state, values, mixing) -> None:
    """Forward substitution with I + M, in place on the first CHUNK rows of from_state and on values; and A's
    blocks below the diagonal put in place.

    below [B, BLOCKS_BELOW, 2 BLOCK, CHUNK - BLOCK] = left . right^T; the rest as in `factor_chunks`.
    """
    for b in range(first, last):
        _solve_chunk(below[b], coupling[b], counts[b // heads], from_state[b], values[b], mixing[b])


@njit(cache=True, nogil=True, error_model="numpy")
def scatter_chunks(first, last, outputs, begins, counts, o) -> None:
    """o [T, H, V]: the chunks' rows of outputs [B, CHUNK, V] go to their tokens."""
    heads = o.shape[1]
    for b in range(first, last):
        for i in range(counts[b // heads]):
            _scaled(outputs[b, i], _ONE, o[begins[b // heads] + i, b % heads])
