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
from sglang_k3.kernels.row_math import LANES, dot, exp, narrow, widen
from sglang_k3.kernels.row_vectors import ROWS, decay_and_add, dots

_EPS = np.float32(NORM_EPS)
_ONE = np.float32(1)

# Rows of the scratch of a head, each [K]: what `prepare` writes, and a row of the state.
KEY, DECAY, DECAYED_QUERY, DECAYED_KEY, _QUERY, _ROW = range(6)
PREPARED_ROWS = 5
SCRATCH_ROWS = 6


@njit(cache=True, nogil=True, error_model="numpy")
def advance_row(row, decay, k, decayed_k, decayed_q, key_query, value, beta):
    """One row [K] of S, in place: S <- S d + u k, u = beta (v - (S d) . k). Returns (S d + u k) . q and u.

    The decay multiplies k and q instead of S before the products, so that S is written once; likewise
    the output is (S d) . q + u (k . q).
    """
    u = beta * (value - dot(row, decayed_k))
    o = dot(row, decayed_q) + u * key_query
    for i in range(row.shape[0]):
        row[i] = row[i] * decay[i] + u * k[i]
    return o, u


@njit(cache=True, nogil=True, error_model="numpy")
def advance_rows(state, first, decay, k, decayed_k, decayed_q, key_query, v0, v1, v2, v3, beta):
    """`advance_row` on ROWS rows of a contiguous fp32 state [V, K] from `first` on, to the same bits.

    Returns their outputs and their u: (o0, o1, o2, o3), (u0, u1, u2, u3).
    """
    width = state.shape[1]
    whole = width - width % LANES
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
    u0 = beta * (v0 - k0)
    u1 = beta * (v1 - k1)
    u2 = beta * (v2 - k2)
    u3 = beta * (v3 - k3)
    replay_rows(state, first, decay, k, u0, u1, u2, u3)
    outputs = (q0 + u0 * key_query, q1 + u1 * key_query, q2 + u2 * key_query, q3 + u3 * key_query)
    return outputs, (u0, u1, u2, u3)


@njit(cache=True, nogil=True, error_model="numpy")
def replay_rows(state, first, decay, k, u0, u1, u2, u3) -> None:
    """The same rows when u is known: S <- S d + u k, the arithmetic of `advance_row`'s last line."""
    width = state.shape[1]
    whole = width - width % LANES
    decay_and_add(state, first, width, decay, k, (u0, u1, u2, u3), whole)
    for i in range(whole, width):
        state[first, i] = state[first, i] * decay[i] + u0 * k[i]
        state[first + 1, i] = state[first + 1, i] * decay[i] + u1 * k[i]
        state[first + 2, i] = state[first + 2, i] * decay[i] + u2 * k[i]
        state[first + 3, i] = state[first + 3, i] * decay[i] + u3 * k[i]


@njit(cache=True, nogil=True, error_model="numpy")
def _advance_floats(state, decay, k, decayed_k, decayed_q, key_query, v, beta, o) -> None:
    """Every row of an fp32 state [V, K], ROWS of them at a time."""
    values = state.shape[0]
    grouped = values - values % ROWS
    for first in range(0, grouped, ROWS):
        (o[first], o[first + 1], o[first + 2], o[first + 3]), _ = advance_rows(
            state,
            first,
            decay,
            k,
            decayed_k,
            decayed_q,
            key_query,
            v[first],
            v[first + 1],
            v[first + 2],
            v[first + 3],
            beta,
        )
    for r in range(grouped, values):
        o[r], _ = advance_row(state[r], decay, k, decayed_k, decayed_q, key_query, v[r], beta)


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
            o[r], _ = advance_row(row, decay, k, decayed_k, decayed_q, key_query, v[r], beta)
            narrow(row, state[r])

    return advance_bits


@njit(cache=True, nogil=True, error_model="numpy")
def prepare_key(k, g, prepared) -> None:
    """prepared[KEY] = k / |k|, prepared[DECAY] = e^g: all that a replay of recorded tokens needs."""
    factor = _ONE / math.sqrt(dot(k, k) + _EPS)
    for i in range(k.shape[0]):
        prepared[KEY, i] = k[i] * factor
        prepared[DECAY, i] = exp(g[i])


@njit(cache=True, nogil=True, error_model="numpy")
def prepare(q, k, g, scale, prepared) -> np.float32:
    """What every row of a head needs of one token: prepared [PREPARED_ROWS, K]. Returns key . query."""
    prepare_key(k, g, prepared)
    factor = scale * (_ONE / math.sqrt(dot(q, q) + _EPS))
    for i in range(q.shape[0]):
        prepared[_QUERY, i] = q[i] * factor
        prepared[DECAYED_QUERY, i] = prepared[DECAY, i] * prepared[_QUERY, i]
        prepared[DECAYED_KEY, i] = prepared[DECAY, i] * prepared[KEY, i]
    return dot(prepared[KEY], prepared[_QUERY])


@njit(cache=True, nogil=True, error_model="numpy")
def token(q, k, v, g, beta, scale, state, scratch, o) -> None:
    """One token of one head, in place on its state.

    q, k, g [K], v, o [V] fp32; beta, scale fp32; state [V, K] fp32 or bf16 bits (rounded once, after the
    token); scratch [SCRATCH_ROWS, K] fp32.
    """
    key_query = prepare(q, k, g, scale, scratch)
    _advance_state(
        state,
        scratch[DECAY],
        scratch[KEY],
        scratch[DECAYED_KEY],
        scratch[DECAYED_QUERY],
        key_query,
        v,
        beta,
        scratch[_ROW],
        o,
    )
