"""One token of one KDA head on a CPU: the row arithmetic that every exact form shares.

Prefill and decode call `token`, verify and commit (records_cpu.py) its pieces, so their bits agree.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from sglang_k3.kernels.kda.reference import NORM_EPS
from sglang_k3.kernels.row_math import LANES, dot, exp, fma, narrow, widen
from sglang_k3.kernels.row_vectors import ROWS, table_decay_and_add, table_decay_and_add_fetching, table_dots

_EPS = np.float32(NORM_EPS)
_ONE = np.float32(1)

AHEAD = 2 * ROWS
"""How far ahead rows of a state are asked for: arithmetic and memory wait for each other otherwise."""

# Rows of the scratch of a head, each [K]: what `prepare` writes, and a row of the state.
KEY, DECAY, DECAYED_QUERY, DECAYED_KEY, _QUERY, _ROW = range(6)
PREPARED_ROWS = 5
SCRATCH_ROWS = 6


@njit(cache=True, nogil=True, error_model="numpy")
def advance_row(row, table, base, key_query, value, beta):
    """One row [K] of S, in place: S <- S d + u k, u = beta (v - (S d) . k). Returns (S d + u k) . q and u.

    table [n, K], base: rows base .. of it are `prepare`'s of the token. The decay multiplies k and q instead
    of S before the products, so that S is written once; likewise the output is (S d) . q + u (k . q).
    """
    u = beta * (value - dot(row, table[base + DECAYED_KEY]))
    o = dot(row, table[base + DECAYED_QUERY]) + u * key_query
    for i in range(row.shape[0]):
        row[i] = fma(row[i], table[base + DECAY, i], u * table[base + KEY, i])
    return o, u


@njit(cache=True, nogil=True, error_model="numpy")
def advance_rows(state, first, table, base, key_query, v0, v1, v2, v3, beta, ahead, ahead_row):
    """`advance_row` on ROWS rows of a contiguous fp32 state [V, K] from `first` on, to the same bits.

    ahead, ahead_row: rows of a matrix [n, K] that will be wanted soon; -1: none.

    Returns their outputs and their u: (o0, o1, o2, o3), (u0, u1, u2, u3).
    """
    width = state.shape[1]
    whole = width - width % LANES
    at_k, at_q = base + DECAYED_KEY, base + DECAYED_QUERY
    k0, q0, k1, q1, k2, q2, k3, q3 = table_dots(state, first, width, table, at_k, at_q, whole)
    for i in range(whole, width):
        k0 = fma(state[first, i], table[at_k, i], k0)
        q0 = fma(state[first, i], table[at_q, i], q0)
        k1 = fma(state[first + 1, i], table[at_k, i], k1)
        q1 = fma(state[first + 1, i], table[at_q, i], q1)
        k2 = fma(state[first + 2, i], table[at_k, i], k2)
        q2 = fma(state[first + 2, i], table[at_q, i], q2)
        k3 = fma(state[first + 3, i], table[at_k, i], k3)
        q3 = fma(state[first + 3, i], table[at_q, i], q3)
    u0 = beta * (v0 - k0)
    u1 = beta * (v1 - k1)
    u2 = beta * (v2 - k2)
    u3 = beta * (v3 - k3)
    replay_rows(state, first, table, base, u0, u1, u2, u3, ahead, ahead_row)
    outputs = (q0 + u0 * key_query, q1 + u1 * key_query, q2 + u2 * key_query, q3 + u3 * key_query)
    return outputs, (u0, u1, u2, u3)


@njit(cache=True, nogil=True, error_model="numpy")
def replay_rows(state, first, table, base, u0, u1, u2, u3, ahead, ahead_row) -> None:
    """The same rows when u is known: S <- S d + u k, the arithmetic of `advance_row`'s last line."""
    width = state.shape[1]
    whole = width - width % LANES
    at_decay, at_k = base + DECAY, base + KEY
    u = (u0, u1, u2, u3)
    if ahead_row < 0:
        table_decay_and_add(state, first, width, table, at_decay, at_k, u, whole)
    else:
        table_decay_and_add_fetching(state, first, width, table, at_decay, at_k, u, whole, ahead, ahead_row)
    for i in range(whole, width):
        decay, k = table[at_decay, i], table[at_k, i]
        state[first, i] = fma(state[first, i], decay, u0 * k)
        state[first + 1, i] = fma(state[first + 1, i], decay, u1 * k)
        state[first + 2, i] = fma(state[first + 2, i], decay, u2 * k)
        state[first + 3, i] = fma(state[first + 3, i], decay, u3 * k)


@njit(cache=True, nogil=True, error_model="numpy")
def _advance_floats(state, table, key_query, v, beta, o) -> None:
    """Every row of an fp32 state [V, K], ROWS of them at a time."""
    values = state.shape[0]
    grouped = values - values % ROWS
    for first in range(0, grouped, ROWS):
        (o[first], o[first + 1], o[first + 2], o[first + 3]), _ = advance_rows(
            state,
            first,
            table,
            0,
            key_query,
            v[first],
            v[first + 1],
            v[first + 2],
            v[first + 3],
            beta,
            state,
            first + AHEAD,
        )
    for r in range(grouped, values):
        o[r], _ = advance_row(state[r], table, 0, key_query, v[r], beta)


def _advance_state(state: Any, table: Any, key_query: Any, v: Any, beta: Any, o: Any) -> None:
    """Inside numba: every row of a state [V, K], fp32 or bf16 bits (through the table's last row)."""
    raise NotImplementedError("only inside numba code")


@overload(_advance_state, jit_options={"cache": True})
def _advance_state_for(state, table, key_query, v, beta, o):
    if state.dtype == types.float32:

        def advance_floats(state, table, key_query, v, beta, o):
            _advance_floats(state, table, key_query, v, beta, o)

        return advance_floats

    def advance_bits(state, table, key_query, v, beta, o):
        row = table[_ROW]
        for r in range(v.shape[0]):
            widen(state[r], row)
            o[r], _ = advance_row(row, table, 0, key_query, v[r], beta)
            narrow(row, state[r])

    return advance_bits


@njit(cache=True, nogil=True, error_model="numpy")
def prepare_key(k, g, table, base) -> None:
    """Rows KEY = k / |k| and DECAY = e^g of a token: all that a replay of recorded tokens needs."""
    factor = _ONE / math.sqrt(dot(k, k) + _EPS)
    for i in range(k.shape[0]):
        table[base + KEY, i] = k[i] * factor
        table[base + DECAY, i] = exp(g[i])


@njit(cache=True, nogil=True, error_model="numpy")
def prepare(q, k, g, scale, table, base) -> np.float32:
    """What every row of a head needs of one token, in PREPARED_ROWS rows of the table [n, K] from `base` on.
    Returns key . query."""
    prepare_key(k, g, table, base)
    factor = scale * (_ONE / math.sqrt(dot(q, q) + _EPS))
    for i in range(q.shape[0]):
        query, decay = q[i] * factor, table[base + DECAY, i]
        table[base + _QUERY, i] = query
        table[base + DECAYED_QUERY, i] = decay * query
        table[base + DECAYED_KEY, i] = decay * table[base + KEY, i]
    return dot(table[base + KEY], table[base + _QUERY])


@njit(cache=True, nogil=True, error_model="numpy")
def token(q, k, v, g, beta, scale, state, scratch, o) -> None:
    """One token of one head, in place on its state.

    q, k, g [K], v, o [V] fp32; beta, scale fp32; state [V, K] fp32 or bf16 bits (rounded once, after the
    token); scratch [SCRATCH_ROWS, K] fp32.
    """
    _advance_state(state, scratch, prepare(q, k, g, scale, scratch, 0), v, beta, o)
