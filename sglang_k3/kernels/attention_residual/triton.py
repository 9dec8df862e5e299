"""Attention-residual mixes in Triton for Ascend's vector cores.

A mix goes over its rows once: score and sum of a row come from the same load, the softmax is kept online.
A token's sum [D] and the key weight stay on the chip, and so does what the next RMSNorm makes of it (NORM).
Not run on hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _score(row, key, eps, D: tl.constexpr):
    """The RMS-normalised row [BD] times the key weight [BD]; both are zero from D on."""
    return tl.sum(row * key, 0) * tl.rsqrt(tl.sum(row * row, 0) / D + eps)


@triton.jit
def _normed(mixed, weight, eps, out, D: tl.constexpr):
    """RMSNorm of a mix [BD], rounded where the reference rounds: before it, and before its weight."""
    kept = mixed.to(out.dtype.element_ty).to(tl.float32)
    unit = kept * tl.rsqrt(tl.sum(kept * kept, 0) / D + eps)
    return unit.to(out.dtype.element_ty).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def mix(
    partial,
    bank,
    key_weight,
    norm_weight,
    out,
    eps,
    norm_eps,
    items,
    rows,
    bank_row,
    D: tl.constexpr,
    BD: tl.constexpr,
    NORM: tl.constexpr,
):
    """partial, out [T, D], bank [rows, T, D] with stride bank_row a row, key_weight [D] fp32; items = T.
    NORM: what is stored is the mix's RMSNorm with norm_weight [D]."""
    column = tl.arange(0, BD)
    inside = column < D
    key = tl.load(key_weight + column, mask=inside, other=0.0)
    if NORM:
        gain = tl.load(norm_weight + column, mask=inside, other=0.0)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        token = item + 0
        t = token.to(tl.int64)
        total = tl.load(partial + t * D + column, mask=inside, other=0.0).to(tl.float32)
        top = _score(total, key, eps, D)
        weight = tl.exp(top - top)
        for j in range(rows):
            which = j + 0
            at = bank + which.to(tl.int64) * bank_row + t * D
            row = tl.load(at + column, mask=inside, other=0.0).to(tl.float32)
            score = _score(row, key, eps, D)
            higher = tl.maximum(top, score)
            keep = tl.exp(top - higher)
            share = tl.exp(score - higher)
            total = total * keep + row * share
            weight = weight * keep + share
            top = higher
        total = total / weight
        if NORM:
            total = _normed(total, gain, norm_eps, out, D)
        tl.store(out + t * D + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def merge_partial(
    partial,
    acc,
    maximum,
    total,
    key_weight,
    norm_weight,
    out,
    eps,
    norm_eps,
    items,
    D: tl.constexpr,
    BD: tl.constexpr,
    NORM: tl.constexpr,
):
    """One mix of a Summary, acc [T, D], maximum, total [T] fp32, joined by partial [T, D]; items = T. NORM as
    in `mix`."""
    column = tl.arange(0, BD)
    inside = column < D
    key = tl.load(key_weight + column, mask=inside, other=0.0)
    if NORM:
        gain = tl.load(norm_weight + column, mask=inside, other=0.0)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        token = item + 0
        t = token.to(tl.int64)
        row = tl.load(partial + t * D + column, mask=inside, other=0.0).to(tl.float32)
        score = _score(row, key, eps, D)
        bank_top = tl.load(maximum + t)
        top = tl.maximum(bank_top, score)
        keep = tl.exp(bank_top - top)
        share = tl.exp(score - top)
        mixed = tl.load(acc + t * D + column, mask=inside, other=0.0) * keep + row * share
        weight = tl.load(total + t) * keep + share
        mixed = mixed / weight
        if NORM:
            mixed = _normed(mixed, gain, norm_eps, out, D)
        tl.store(out + t * D + column, mixed.to(out.dtype.element_ty), mask=inside)
