"""short_conv on a CPU: numba over blocks of channels. One kernel serves all phases, so it is exact."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from sglang_k3.kernels.registry import register
from sglang_k3.kernels.row_math import (
    array_of,
    float_rows,
    fp32_or_bf16,
    narrow,
    sigmoid,
    widen,
)
from sglang_k3.kernels.split import over_items

_BLOCK = 1024  # channels a thread takes at a time, so that one block's rows and taps stay in L1
_ZERO = np.float32(0)


@njit(cache=True, nogil=True, error_model="numpy")
def _clear(row) -> None:
    for c in range(row.shape[0]):
        row[c] = _ZERO


@njit(cache=True, nogil=True, error_model="numpy")
def _add_tap(tap, row, y) -> None:
    for c in range(y.shape[0]):
        y[c] += tap[c] * row[c]


@njit(cache=True, nogil=True, error_model="numpy")
def _token(x, history, taps, begin, token, first, y) -> None:
    """y [B] = SiLU(sum over taps, oldest row first), for the B channels from `first`.

    x [T, C] fp32; history [W - 1, B] fp32, the rows before `begin`; taps [W, C].
    """
    last = first + y.shape[0]
    _clear(y)
    for tap in range(taps.shape[0]):
        row = token - (taps.shape[0] - 1) + tap
        if row >= begin:
            _add_tap(taps[tap, first:last], x[row, first:last], y)
        else:
            _add_tap(taps[tap, first:last], history[row - begin + history.shape[0]], y)
    for c in range(y.shape[0]):
        y[c] *= sigmoid(y[c])


@njit(cache=True, nogil=True, error_model="numpy")
def _keep_window(x, history, begin, count, first, window) -> None:
    """window [W - 1, C] = the last W - 1 rows of (history, then x[begin : begin + count]), for one block."""
    rows = history.shape[0]
    last = first + history.shape[1]
    for j in range(rows):
        row = count - rows + j
        if row >= 0:
            narrow(x[begin + row, first:last], window[j, first:last])
        else:
            narrow(history[row + rows], window[j, first:last])


@njit(cache=True, nogil=True, error_model="numpy")
def _history(window, fresh, first, history) -> None:
    """history [W - 1, B] fp32: one block of the rows before a request's first token."""
    for j in range(history.shape[0]):
        if fresh:
            _clear(history[j])
        else:
            widen(window[j, first : first + history.shape[1]], history[j])


@njit(cache=True, nogil=True, error_model="numpy")
def _convolve_block(
    x, taps, window_pool, slots, cu_seqlens, fresh, track_offsets, track_slots, first, last, y
) -> None:
    """All requests, for the channels first .. last."""
    history = np.empty((taps.shape[0] - 1, last - first), np.float32)
    for n in range(slots.shape[0]):
        if slots[n] < 0:
            continue
        begin, end = cu_seqlens[n], cu_seqlens[n + 1]
        window = window_pool[slots[n]]
        _history(window, fresh[n], first, history)
        for token in range(begin, end):
            _token(x, history, taps, begin, token, first, y[token, first:last])
        if track_offsets[n] >= 0 and track_slots[n] >= 0:
            _keep_window(x, history, begin, track_offsets[n], first, window_pool[track_slots[n]])
        _keep_window(x, history, begin, end - begin, first, window)


@njit(cache=True, nogil=True, error_model="numpy")
def _convolve(
    first_block, last_block, x, taps, window_pool, slots, cu_seqlens, fresh, track_offsets, track_slots, y
) -> None:
    channels = x.shape[1]
    for block in range(first_block, last_block):
        first = block * _BLOCK
        last = min(first + _BLOCK, channels)
        _convolve_block(
            x, taps, window_pool, slots, cu_seqlens, fresh, track_offsets, track_slots, first, last, y
        )


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    window_pool: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: np.ndarray,
    fresh: np.ndarray,
    track_offsets: np.ndarray,
    track_slots: np.ndarray,
) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=torch.float32)
    # A weight stored as [W, C] and passed transposed costs no copy here.
    taps = float_rows(weight.t())
    over_items(
        _convolve,
        -(-x.shape[1] // _BLOCK),
        x.numel(),
        float_rows(x),
        taps,
        array_of(window_pool),
        slots.numpy(),
        cu_seqlens,
        fresh,
        track_offsets,
        track_slots,
        y.numpy(),
    )
    return y.to(x.dtype)


@register("short_conv.extend", "numba", preference=10, exact=True, supports=fp32_or_bf16)
def extend(
    x: torch.Tensor,
    weight: torch.Tensor,
    window_pool: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    fresh: torch.Tensor,
    track_offsets: torch.Tensor,
    track_slots: torch.Tensor,
) -> torch.Tensor:
    """See `reference.extend`. x and window_pool are fp32 or bf16."""
    return _run(
        x,
        weight,
        window_pool,
        slots,
        cu_seqlens.numpy(),
        fresh.numpy(),
        track_offsets.numpy(),
        track_slots.numpy(),
    )


@register("short_conv.decode", "numba", preference=10, exact=True, supports=fp32_or_bf16)
def decode(
    x: torch.Tensor, weight: torch.Tensor, window_pool: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """See `reference.decode`."""
    requests = slots.shape[0]
    untracked = np.full(requests, -1)
    return _run(
        x,
        weight,
        window_pool,
        slots,
        np.arange(requests + 1),
        np.zeros(requests, np.bool_),
        untracked,
        untracked,
    )


@njit(cache=True, nogil=True, error_model="numpy")
def _verify(first_block, last_block, x, taps, window_pool, slots, cu_seqlens, bank_rows, bank_x, y) -> None:
    channels = x.shape[1]
    for block in range(first_block, last_block):
        first = block * _BLOCK
        last = min(first + _BLOCK, channels)
        history = np.empty((taps.shape[0] - 1, last - first), np.float32)
        for n in range(slots.shape[0]):
            if slots[n] < 0:
                continue
            _history(window_pool[slots[n]], False, first, history)
            begin = cu_seqlens[n]
            for token in range(begin, cu_seqlens[n + 1]):
                _token(x, history, taps, begin, token, first, y[token, first:last])
                narrow(x[token, first:last], bank_x[bank_rows[n], token - begin, first:last])


@register("short_conv.verify", "numba", preference=10, exact=True, supports=fp32_or_bf16)
def verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    window_pool: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    bank_rows: torch.Tensor,
    bank_x: torch.Tensor,
) -> torch.Tensor:
    """See `reference.verify`. x, window_pool and bank_x are fp32 or bf16."""
    y = torch.zeros(x.shape, dtype=torch.float32)
    over_items(
        _verify,
        -(-x.shape[1] // _BLOCK),
        x.numel(),
        float_rows(x),
        float_rows(weight.t()),
        array_of(window_pool),
        slots.numpy(),
        cu_seqlens.numpy(),
        bank_rows.numpy(),
        array_of(bank_x),
        y.numpy(),
    )
    return y.to(x.dtype)


@njit(cache=True, nogil=True, error_model="numpy")
def _shift(window, accepted, count, target) -> None:
    """target [W - 1, C] = the last W - 1 rows of (window, then accepted[:count]); may be the window itself,
    because each row comes from a later one."""
    rows = window.shape[0]
    for j in range(rows):
        source = count + j
        for c in range(window.shape[1]):
            target[j, c] = window[source, c] if source < rows else accepted[source - rows, c]


@njit(cache=True, nogil=True, error_model="numpy")
def _commit(
    first, last, window_pools, slots, bank_rows, bank_x, counts, track_pools, track_offsets, track_slots
) -> None:
    requests = slots.shape[0]
    for item in range(first, last):
        layer = item // requests
        n = item % requests
        if slots[n] < 0 or counts[n] <= 0:
            continue
        window = window_pools[layer, slots[n]]
        accepted = bank_x[layer, bank_rows[n]]
        if track_slots[n] >= 0 and 0 <= track_offsets[n] <= counts[n]:
            _shift(window, accepted, track_offsets[n], track_pools[layer, track_slots[n]])
        _shift(window, accepted, counts[n], window)


@register("short_conv.commit", "numba", preference=10, exact=True, supports=fp32_or_bf16)
def commit(
    window_pools: torch.Tensor,
    slots: torch.Tensor,
    bank_rows: torch.Tensor,
    bank_x: torch.Tensor,
    counts: torch.Tensor,
    track_pools: torch.Tensor,
    track_offsets: torch.Tensor,
    track_slots: torch.Tensor,
) -> None:
    """See `reference.commit`: one call for all layers."""
    layers, _, rows, channels = window_pools.shape
    items = layers * slots.shape[0]
    over_items(
        _commit,
        items,
        items * rows * channels,
        array_of(window_pools),
        slots.numpy(),
        bank_rows.numpy(),
        array_of(bank_x),
        counts.numpy(),
        array_of(track_pools),
        track_offsets.numpy(),
        track_slots.numpy(),
    )
