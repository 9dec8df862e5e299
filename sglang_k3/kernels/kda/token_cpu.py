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
from sglang_k3.kernels.row_math import dot, exp, narrow, widen

_EPS = np.float32(NORM_EPS)
_ONE = np.float32(1)

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


def _as_floats(row: Any, scratch: Any) -> Any:
    """Inside numba: the row itself if it is fp32, else its widened copy in scratch."""
    raise NotImplementedError("only inside numba code")


def _put_back(values: Any, row: Any) -> None:
    """Inside numba: store what `_as_floats` returned."""
    raise NotImplementedError("only inside numba code")


@overload(_as_floats, jit_options={"cache": True})
def _as_floats_for(row, scratch):
    if row.dtype == types.float32:
        return lambda row, scratch: row

    def copy(row, scratch):
        widen(row, scratch)
        return scratch

    return copy


@overload(_put_back, jit_options={"cache": True})
def _put_back_for(values, row):
    if row.dtype == types.float32:
        return lambda values, row: None
    return lambda values, row: narrow(values, row)


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
    key_query = dot(scratch[_K], scratch[_Q])
    for r in range(v.shape[0]):
        row = _as_floats(state[r], scratch[_ROW])
        o[r] = advance_row(
            row,
            scratch[_DECAY],
            scratch[_K],
            scratch[_DECAYED_K],
            scratch[_DECAYED_Q],
            key_query,
            v[r],
            beta,
        )
        _put_back(row, state[r])
