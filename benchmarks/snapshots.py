"""The rival of replay records: a verify that keeps the whole state behind each drafted row.

What a server without records does: the recurrence over the drafts with every state stored, then the accepted
one copied back. Written with our own row kernels, so that only the form differs.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from sglang_k3.kernels.kda.token_cpu import PREPARED_ROWS, advance_rows, prepare
from sglang_k3.kernels.row_math import float_rows
from sglang_k3.kernels.row_vectors import ROWS
from sglang_k3.kernels.split import over_items


@njit(cache=True, nogil=True, error_model="numpy")
def _copy(source, target) -> None:
    for r in range(source.shape[0]):
        for c in range(source.shape[1]):
            target[r, c] = source[r, c]


@njit(cache=True, nogil=True, error_model="numpy")
def _verify(first, last, q, k, v, g, beta, states, slots, rows, scale, kept, o) -> None:
    heads, width = q.shape[1], q.shape[2]
    table = np.empty((PREPARED_ROWS, width), np.float32)
    for item in range(first, last):
        n = item // heads
        h = item % heads
        before = states[slots[n], h]
        for i in range(rows):
            t = n * rows + i
            key_query = prepare(q[t, h], k[t, h], g[t, h], scale, table, 0)
            state = kept[n, i, h]
            _copy(before, state)
            for r in range(0, state.shape[0], ROWS):
                outputs, _ = advance_rows(
                    state,
                    r,
                    table,
                    0,
                    key_query,
                    v[t, h, r],
                    v[t, h, r + 1],
                    v[t, h, r + 2],
                    v[t, h, r + 3],
                    beta[t, h],
                    state,
                    -1,
                )
                o[t, h, r], o[t, h, r + 1], o[t, h, r + 2], o[t, h, r + 3] = outputs
            before = state


@njit(cache=True, nogil=True, error_model="numpy")
def _restore(first, last, states, slots, counts, kept) -> None:
    heads = states.shape[1]
    for item in range(first, last):
        n = item // heads
        h = item % heads
        _copy(kept[n, counts[n] - 1, h], states[slots[n], h])


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    slots: torch.Tensor,
    kept: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As `kda.verify` with as many rows for each request; kept [N, D, H, V, K] fp32 takes every state. V
    % 4 = 0."""
    o = torch.empty(v.shape)
    over_items(
        _verify,
        slots.shape[0] * v.shape[1],
        kept.numel(),
        *(float_rows(x) for x in (q, k, v, g, beta)),
        state_pool.numpy(),
        slots.numpy(),
        kept.shape[1],
        np.float32(scale),
        kept.numpy(),
        o.numpy(),
    )
    return o


def restore(state_pool: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, kept: torch.Tensor) -> None:
    """The state behind counts[n] accepted rows back to each slot."""
    over_items(
        _restore,
        slots.shape[0] * state_pool.shape[1],
        slots.shape[0] * state_pool[0].numel(),
        state_pool.numpy(),
        slots.numpy(),
        counts.numpy(),
        kept.numpy(),
    )
