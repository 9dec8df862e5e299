"""block_attention on a CPU: one pass over the context, in the cache, for all queries of a key head."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from sglang_k3.kernels.registry import Call, register
from sglang_k3.kernels.row_math import LANES, array_of, exp, float_rows, fp32_or_bf16, widen
from sglang_k3.kernels.row_vectors import ROWS, add_rows, matrix_dots
from sglang_k3.kernels.split import over_items

_TILE = 64
"""Keys taken at a time: widened once, then read by every query of the group."""

_LOWEST = np.float32(-3.0e38)
_ZERO = np.float32(0)
_ONE = np.float32(1)


@njit(cache=True, nogil=True, error_model="numpy")
def _attend_tile(q, keys, values, first_key, count, limit, scale, scores, acc, row, state) -> None:
    """One query over one tile. state: (running maximum, running sum). Keys from `limit` on are not seen."""
    width = q.shape[0]
    highest = state[0]
    padded = -(-count // ROWS) * ROWS
    for key in range(0, padded, ROWS):
        scores[key], scores[key + 1], scores[key + 2], scores[key + 3] = matrix_dots(
            keys, key, width, q, width
        )
    for key in range(count):
        scores[key] *= scale
        if first_key + key >= limit:
            scores[key] = _LOWEST
        highest = max(highest, scores[key])
    if highest <= _LOWEST:
        return
    keep = exp(state[0] - highest)
    total = state[1] * keep
    for key in range(count):
        scores[key] = exp(scores[key] - highest) if scores[key] > _LOWEST else _ZERO
        total += scores[key]
    for key in range(count, padded):
        scores[key] = _ZERO
    target = acc[row]
    if keep != _ONE:
        for c in range(width):
            target[c] *= keep
    for key in range(0, padded, ROWS):
        add_rows(
            target,
            values,
            key,
            width,
            (scores[key], scores[key + 1], scores[key + 2], scores[key + 3]),
            width,
        )
    state[0], state[1] = highest, total


@njit(cache=True, nogil=True, error_model="numpy")
def _attend_all(
    q, n, g, group, keys, values, first_key, count, length, causal, scale, scores, acc, states
) -> None:
    """Every query of key head g over one tile."""
    rows = q.shape[1]
    for b in range(rows):
        limit = length + b + 1 if causal else length + rows
        for j in range(group):
            _attend_tile(
                q[n, b, g * group + j],
                keys,
                values,
                first_key,
                count,
                limit,
                scale,
                scores,
                acc,
                b * group + j,
                states[b * group + j],
            )


@njit(cache=True, nogil=True, error_model="numpy")
def _attend(
    first, last, q, k, v, k_cache, v_cache, token_table, request_rows, context_lens, scale, causal, out
) -> None:
    rows, width, heads = q.shape[1], q.shape[3], k.shape[2]
    group = q.shape[2] // heads
    keys = np.zeros((_TILE, width), np.float32)
    values = np.zeros((_TILE, width), np.float32)
    scores = np.empty(_TILE, np.float32)
    acc = np.empty((rows * group, width), np.float32)
    states = np.empty((rows * group, 2), np.float32)
    for item in range(first, last):
        n = item // heads
        g = item % heads
        acc[:] = _ZERO
        states[:, 0] = _LOWEST
        states[:, 1] = _ZERO
        length = context_lens[n]
        for start in range(0, length, _TILE):
            count = min(_TILE, length - start)
            for key in range(count):
                slot = token_table[request_rows[n], start + key]
                widen(k_cache[slot, g], keys[key])
                widen(v_cache[slot, g], values[key])
            _attend_all(
                q, n, g, group, keys, values, start, count, length, causal, scale, scores, acc, states
            )
        for start in range(0, rows, _TILE):
            count = min(_TILE, rows - start)
            for key in range(count):
                widen(k[n, start + key, g], keys[key])
                widen(v[n, start + key, g], values[key])
            _attend_all(
                q,
                n,
                g,
                group,
                keys,
                values,
                length + start,
                count,
                length,
                causal,
                scale,
                scores,
                acc,
                states,
            )
        for b in range(rows):
            for j in range(group):
                inverse = _ONE / states[b * group + j, 1]
                for c in range(width):
                    out[n, b, g * group + j, c] = acc[b * group + j, c] * inverse


def _supports(call: Call) -> str | None:
    width = call.dims.get("D", LANES)
    if width % LANES:
        return f"a head of {width} is not a multiple of {LANES}"
    return fp32_or_bf16(call)


@register("block_attention", "numba", preference=10, exact=True, supports=_supports)
def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    token_table: torch.Tensor,
    request_rows: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """See `reference.block_attention`. q, k, v and the caches fp32 or bf16; D a multiple of 8.

    A request's bits do not depend on the requests beside it.
    """
    out = torch.empty(q.shape, dtype=torch.float32)
    over_items(
        _attend,
        k.shape[0] * k.shape[2],
        q.numel() * (int(context_lens.sum()) // max(len(context_lens), 1) + q.shape[1]) // LANES,
        float_rows(q),
        float_rows(k),
        float_rows(v),
        array_of(k_cache),
        array_of(v_cache),
        token_table.numpy(),
        request_rows.numpy(),
        context_lens.numpy(),
        np.float32(scale),
        causal,
        out.numpy(),
    )
    return out.to(q.dtype)
