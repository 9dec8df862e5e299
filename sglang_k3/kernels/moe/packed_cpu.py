"""Packed MXFP4 experts on a CPU, straight from their 4 bits: each block is decoded in registers.

Decoding costs several times a multiplication, so a decoded block meets up to four rows of its expert. Beyond
`FUSED_ROWS` rows an expert, unpacking once and a matrix product are faster.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from sglang_k3.kernels.activation.cpu import gated, silu, situ, situ_clipped
from sglang_k3.kernels.mx.codes_cpu import (
    BLOCK,
    HALF,
    SCALES,
    dot_1,
    dots_4,
    split_place,
    split_quarters,
    unpack_row,
)
from sglang_k3.kernels.registry import register
from sglang_k3.kernels.row_math import LANES, float_rows, fp32_only, fp32_or_plain_bf16
from sglang_k3.kernels.split import over_items, threads_for

FUSED_ROWS = 8
"""Rows an expert, on average, up to which blocks are decoded for them; found by benchmarks/kernels.py."""

_TILE_BYTES = 1 << 24
"""Of an unpacked piece of a matrix: it fits a third-level cache, and starting its product costs little beside
it (pieces of 1 MiB took three times as long for 16 rows of 3,072 x 3,584)."""

_SILU, _SITU, _SITU_CLIPPED = range(3)
_ROWS = 4


class _Weights(NamedTuple):
    """Both matrices of E experts: codes and scales of w13 [E, 2I, D] and w2 [E, D, I], contiguous bytes."""

    w13: np.ndarray
    w13_scale: np.ndarray
    w2: np.ndarray
    w2_scale: np.ndarray


class _Activation(NamedTuple):
    kind: int
    beta: np.float32
    linear_beta: np.float32


class _Plan(NamedTuple):
    """P (token, expert) pairs in ascending order of expert, in S segments of one expert each.

    rows [P]: the pair's token. shares [P] fp32: its weight. experts [S]; starts [S + 1]: pairs of a segment.
    """

    rows: np.ndarray
    shares: np.ndarray
    experts: np.ndarray
    starts: np.ndarray


def plan(ids: torch.Tensor, weights: torch.Tensor, first_expert: int, experts: int) -> _Plan:
    """ids, weights [T, k]; ids outside first_expert .. first_expert + experts - 1 are left out."""
    pairs = ids.numel()
    rows, chosen = np.empty(pairs, np.int64), np.empty(pairs, np.int64)
    shares, starts = np.empty(pairs, np.float32), np.empty(pairs + 1, np.int64)
    kept, segments = _sort_pairs(
        ids.numpy(), float_rows(weights), first_expert, experts, rows, shares, chosen, starts
    )
    return _Plan(rows[:kept], shares[:kept], chosen[:segments], starts[: segments + 1])


@njit(cache=True, nogil=True, error_model="numpy")
def _sort_pairs(ids, weights, first_expert, experts, rows, shares, chosen, starts):
    """Fill a `_Plan`'s arrays by a counting sort, tokens ascending within an expert; (pairs, segments)."""
    next_place = np.zeros(experts + 1, np.int64)
    for t in range(ids.shape[0]):
        for i in range(ids.shape[1]):
            expert = ids[t, i] - first_expert
            if 0 <= expert < experts:
                next_place[expert + 1] += 1
    segments = 0
    for expert in range(experts):
        if next_place[expert + 1] > 0:
            chosen[segments] = expert
            starts[segments] = next_place[expert]
            segments += 1
        next_place[expert + 1] += next_place[expert]
    kept = next_place[experts]
    starts[segments] = kept
    for t in range(ids.shape[0]):
        for i in range(ids.shape[1]):
            expert = ids[t, i] - first_expert
            if 0 <= expert < experts:
                place = next_place[expert]
                rows[place] = t
                shares[place] = weights[t, i]
                next_place[expert] = place + 1
    return kept, segments


@njit(cache=True, nogil=True, error_model="numpy")
def _activate(kind, gate, up, beta, linear_beta):
    if kind == _SILU:
        return silu(gate, up)
    if kind == _SITU:
        return situ(gate, up, beta)
    return situ_clipped(gate, up, beta, linear_beta)


@njit(cache=True, nogil=True, error_model="numpy")
def _inner(first, last, x, experts, starts, packed, scale, table, inner, kind, beta, linear_beta, h) -> None:
    """Items: (segment, inner column). x [P, D] in split form -> h [P, I] in split form."""
    blocks = x.shape[1] // BLOCK
    for item in range(first, last):
        segment = item // inner
        column = item % inner
        gate_row = experts[segment] * 2 * inner + column
        up_row = gate_row + inner
        place = split_place(column)
        p = starts[segment]
        end = starts[segment + 1]
        while p < end:
            if end - p >= _ROWS:
                gates = dots_4(
                    packed, gate_row * blocks * HALF, scale, gate_row * blocks, table, x, p, blocks
                )
                ups = dots_4(packed, up_row * blocks * HALF, scale, up_row * blocks, table, x, p, blocks)
                h[p, place] = _activate(kind, gates[0], ups[0], beta, linear_beta)
                h[p + 1, place] = _activate(kind, gates[1], ups[1], beta, linear_beta)
                h[p + 2, place] = _activate(kind, gates[2], ups[2], beta, linear_beta)
                h[p + 3, place] = _activate(kind, gates[3], ups[3], beta, linear_beta)
                p += _ROWS
            else:
                gate = dot_1(packed, gate_row * blocks * HALF, scale, gate_row * blocks, table, x, p, blocks)
                up = dot_1(packed, up_row * blocks * HALF, scale, up_row * blocks, table, x, p, blocks)
                h[p, place] = _activate(kind, gate, up, beta, linear_beta)
                p += 1


@njit(cache=True, nogil=True, error_model="numpy")
def _outer(first, last, h, rows, shares, experts, starts, packed, scale, table, width, out) -> None:
    """Items: output columns. h [P, I] in split form; out [T, D] fp32, experts ascending."""
    blocks = h.shape[1] // BLOCK
    for column in range(first, last):
        for segment in range(experts.shape[0]):
            row = experts[segment] * width + column
            p = starts[segment]
            end = starts[segment + 1]
            while p < end:
                if end - p >= _ROWS:
                    sums = dots_4(packed, row * blocks * HALF, scale, row * blocks, table, h, p, blocks)
                    out[rows[p], column] += shares[p] * sums[0]
                    out[rows[p + 1], column] += shares[p + 1] * sums[1]
                    out[rows[p + 2], column] += shares[p + 2] * sums[2]
                    out[rows[p + 3], column] += shares[p + 3] * sums[3]
                    p += _ROWS
                else:
                    one = dot_1(packed, row * blocks * HALF, scale, row * blocks, table, h, p, blocks)
                    out[rows[p], column] += shares[p] * one
                    p += 1


@njit(cache=True, nogil=True, error_model="numpy")
def _unpack(first, last, packed, scale, table, row, blocks, out) -> None:
    """Rows row + first .. row + last - 1 of the flat matrix into out [n, 32 * blocks], in split form."""
    flat = out.reshape(out.size)
    for r in range(first, last):
        at = (row + r) * blocks
        unpack_row(packed, at * HALF, scale, at, table, flat, r * blocks * BLOCK, blocks)


@njit(cache=True, nogil=True, error_model="numpy")
def _add_shares(first, last, values, rows, shares, out) -> None:
    """Items: pairs of one expert, each another token: out[rows[p]] += shares[p] values[p]."""
    for p in range(first, last):
        t = rows[p]
        for d in range(values.shape[1]):
            out[t, d] += shares[p] * values[p, d]


def _split(x: torch.Tensor) -> np.ndarray:
    rows = float_rows(x)
    out = np.empty_like(rows)
    split_quarters(rows, out)
    return out


def _activation(beta: float | None, linear_beta: float | None) -> _Activation:
    if beta is None:
        return _Activation(_SILU, np.float32(0), np.float32(0))
    if linear_beta is None:
        return _Activation(_SITU, np.float32(beta), np.float32(0))
    return _Activation(_SITU_CLIPPED, np.float32(beta), np.float32(linear_beta))


def product(x: np.ndarray, packed: np.ndarray, scale: np.ndarray, first: int, rows: int) -> torch.Tensor:
    """x [R, C] fp32 in split form times matrix rows first .. first + rows - 1 -> [R, rows] fp32.

    packed, scale: contiguous bytes of any shape. Unpacked a tile at a time, so that a tile is read from a
    cache by its product.
    """
    blocks = x.shape[1] // BLOCK
    out = torch.empty(x.shape[0], rows)
    tile = max(16, _TILE_BYTES // (4 * x.shape[1]))
    weights = np.empty((min(tile, rows), x.shape[1]), np.float32)
    inputs = torch.from_numpy(x)
    for start in range(0, rows, tile):
        count = min(tile, rows - start)
        over_items(_unpack, count, count * x.shape[1], packed, scale, SCALES, first + start, blocks, weights)
        with threads_for(2 * x.size * count):
            torch.mm(inputs, torch.from_numpy(weights[:count]).T, out=out[:, start : start + count])
    return out


def _decoded_in_place(
    x: np.ndarray, steps: _Plan, weights: _Weights, act: _Activation, inner: int, out: torch.Tensor
) -> None:
    """Few rows an expert. x [P, D] in split form, a row for each pair; adds to out [T, D] fp32."""
    pairs, width = x.shape
    h = np.empty((pairs, inner), np.float32)
    over_items(
        _inner,
        len(steps.experts) * inner,
        2 * pairs * inner * width // LANES,
        x,
        steps.experts,
        steps.starts,
        weights.w13,
        weights.w13_scale,
        SCALES,
        inner,
        *act,
        h,
    )
    over_items(
        _outer,
        width,
        pairs * inner * width // LANES,
        h,
        steps.rows,
        steps.shares,
        steps.experts,
        steps.starts,
        weights.w2,
        weights.w2_scale,
        SCALES,
        width,
        out.numpy(),
    )


def _unpacked_by_tile(
    x: np.ndarray,
    steps: _Plan,
    weights: _Weights,
    betas: tuple[float | None, float | None],
    inner: int,
    out: torch.Tensor,
) -> None:
    """Many rows an expert; arguments as above."""
    width = x.shape[1]
    for segment, expert in enumerate(steps.experts.tolist()):
        part = slice(steps.starts[segment], steps.starts[segment + 1])
        gate_up = product(x[part], weights.w13, weights.w13_scale, expert * 2 * inner, 2 * inner)
        h = _split(gated(gate_up, *betas))
        rows = product(h, weights.w2, weights.w2_scale, expert * width, width)
        count = rows.shape[0]
        target = out.numpy()
        over_items(
            _add_shares, count, rows.numel(), rows.numpy(), steps.rows[part], steps.shares[part], target
        )


def _experts(
    fused_rows: float,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    betas: tuple[float | None, float | None],
    first_expert: int,
) -> torch.Tensor:
    experts, inner = parts[0].shape[0], parts[0].shape[1] // 2
    steps = plan(ids, weights, first_expert, experts)
    out = torch.zeros(x.shape, dtype=torch.float32)
    pairs = len(steps.rows)
    if pairs:
        matrices = _Weights(*(part.contiguous().numpy() for part in parts))
        rows = _split(x)[steps.rows]
        if pairs <= fused_rows * len(steps.experts):
            _decoded_in_place(rows, steps, matrices, _activation(*betas), inner, out)
        else:
            _unpacked_by_tile(rows, steps, matrices, betas, inner, out)
    return out.to(x.dtype)


@register("moe.experts_mxfp4", "packed", preference=20, supports=fp32_or_plain_bf16)
def experts_mxfp4(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13_packed: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_packed: torch.Tensor,
    w2_scale: torch.Tensor,
    beta: float | None,
    linear_beta: float | None,
    first_expert: int = 0,
) -> torch.Tensor:
    """Arguments and result as the reference; everything in between is fp32, whatever x's dtype."""
    parts = (w13_packed, w13_scale, w2_packed, w2_scale)
    return _experts(FUSED_ROWS, x, ids, weights, parts, (beta, linear_beta), first_expert)


@register("moe.experts_mxfp4", "decoded", preference=5, exact=True, supports=fp32_only)
def experts_mxfp4_decoded(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13_packed: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_packed: torch.Tensor,
    w2_scale: torch.Tensor,
    beta: float | None,
    linear_beta: float | None,
    first_expert: int = 0,
) -> torch.Tensor:
    """The same with blocks decoded in place however many rows there are: a row sees itself alone."""
    parts = (w13_packed, w13_scale, w2_packed, w2_scale)
    return _experts(math.inf, x, ids, weights, parts, (beta, linear_beta), first_expert)
