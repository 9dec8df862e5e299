"""One token of one KDA head on a CPU: the row arithmetic that every exact form shares.

Prefill, decode, and whatever replays tokens later call `token` (or `advance_row`), so their bits agree.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from sglang_k3.kernels.kda.reference import NORM_EPS
from sglang_k3.kernels.row_math import LANES, dot, exp, narrow, widen
from sglang_k3.kernels.row_vectors import ROWS, decay_and_add, dots, fetch_rows

_EPS = np.float32(NORM_EPS)
_ONE = np.float32(1)

_FETCH_AHEAD = 32
"""Rows of a state asked for ahead of time: its memory traffic does not overlap with arithmetic otherwise."""

# Rows of the scratch of a head, each [K].
_Q, _K, _DECAY, _DECAYED_Q, _DECAYED_K, _ROW = range(6)
SCRATCH_ROWS = 6


@njit(cache=True, nogil=True, error_model="numpy")
def advance_row(row, decay, k, decayed_k, decayed_q, key_query, value, beta):
    """One row [K] of S, in place: S <- S d + u k with u = beta (v - (S d) . k); returns (S d + u k) . q.

    The decay multiplies k and q instead of S before the products, so that S is written once; likewise
    the output is (S d) . q + u (k . q).
    """
    u = beta * (value - dot(row, decayed_k))
    o = dot(row, decayed_q) + u * key_query
    for i in range(row.shape[0]):
        row[i] = row[i] * decay[i] + u * k[i]
    return o


@njit(cache=True, nogil=True, error_model="numpy")
def _advance_floats(state, decay, k, decayed_k, decayed_q, key_query, v, beta, o) -> None:
    """`advance_row` on every row of an fp32 state [V, K], ROWS of them at a time, to the same bits."""
    values, width = state.shape
    whole = width - width % LANES
    grouped = values - values % ROWS
    for first in range(0, grouped, ROWS):
        fetch_rows(state, first + _FETCH_AHEAD, width, width)
        k0, q0, k1, q1, k2, q2, k3, q3 = dots(state, first, width, decayed_k, decayed_q, whole)
        for i in range(whole, width):
            k0 += state[first, i] * decayed_k[i]
            q0 += state[first, i] * decayed_q[i]
            k1 += state[first + 1, i] * decayed_k[i]
            q1 += state[first + 1, i] * decayed_q[i]
            k2 += state[first + 2, i] * decayed_k[i]
            q2 += state[first + 2, i] * decayed_q[i]
            k3 += state[first + 3, i] * decayed_k[i]
            q3 += state[first + 3, i] * decayed_q[i]
        u0 = beta * (v[first] - k0)
        u1 = beta * (v[first + 1] - k1)
        u2 = beta * (v[first + 2] - k2)
        u3 = beta * (v[first + 3] - k3)
        o[first] = q0 + u0 * key_query
        o[first + 1] = q1 + u1 * key_query
        o[first + 2] = q2 + u2 * key_query
        o[first + 3] = q3 + u3 * key_query
        decay_and_add(state, first, width, decay, k, (u0, u1, u2, u3), whole)
        for i in range(whole, width):
            state[first, i] = state[first, i] * decay[i] + u0 * k[i]
            state[first + 1, i] = state[first + 1, i] * decay[i] + u1 * k[i]
            state[first + 2, i] = state[first + 2, i] * decay[i] + u2 * k[i]
            state[first + 3, i] = state[first + 3, i] * decay[i] + u3 * k[i]
    for r in range(grouped, values):
        o[r] = advance_row(state[r], decay, k, decayed_k, decayed_q, key_query, v[r], beta)


def _advance_state(
    state: Any,
    decay: Any,
    k: Any,
    decayed_k: Any,
    decayed_q: Any,
    key_query: Any,
    v: Any,
    beta: Any,
    row: Any,
    o: Any,
) -> None:
    """Inside numba: every row of a state [V, K], fp32 or bf16 bits (through the scratch row [K])."""
    raise NotImplementedError("only inside numba code")


@overload(_advance_state, jit_options={"cache": True})
def _advance_state_for(state, decay, k, decayed_k, decayed_q, key_query, v, beta, row, o):
    if state.dtype == types.float32:

        def advance_floats(state, decay, k, decayed_k, decayed_q, key_query, v, beta, row, o):
            _advance_floats(state, decay, k, decayed_k, decayed_q, key_query, v, beta, o)

        return advance_floats

    def advance_bits(state, decay, k, decayed_k, decayed_q, key_query, v, beta, row, o):
        for r in range(v.shape[0]):
            widen(state[r], row)
            o[r] = advance_row(row, decay, k, decayed_k, decayed_q, key_query, v[r], beta)
            narrow(row, state[r])

    return advance_bits


@njit(cache=True, nogil=True, error_model="numpy")
def token(q, k, v, g, beta, scale, state, scratch, o) -> None:
    """One token of one head, in place on its state.

    q, k, g [K], v, o [V] fp32; beta, scale fp32; state [V, K] fp32 or bf16 bits (rounded once, after the
    token); scratch [SCRATCH_ROWS, K] fp32.
    """
    q_factor = scale * (_ONE / math.sqrt(dot(q, q) + _EPS))
    k_factor = _ONE / math.sqrt(dot(k, k) + _EPS)
    for i in range(q.shape[0]):
        scratch[_Q, i] = q[i] * q_factor
        scratch[_K, i] = k[i] * k_factor
        scratch[_DECAY, i] = exp(g[i])
        scratch[_DECAYED_Q, i] = scratch[_DECAY, i] * scratch[_Q, i]
        scratch[_DECAYED_K, i] = scratch[_DECAY, i] * scratch[_K, i]
    _advance_state(
        state,
        scratch[_DECAY],
        scratch[_K],
        scratch[_DECAYED_K],
        scratch[_DECAYED_Q],
        dot(scratch[_K], scratch[_Q]),
        v,
        beta,
        scratch[_ROW],
        o,
    )
