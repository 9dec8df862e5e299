"""Gated RMSNorm in Triton for Ascend's vector cores: a block of heads' rows a time. Not run on hardware."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated_rms_norm(
    o, gate, weight, out, eps, items, rows, V: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr
):
    """o, gate, out [rows, V] packed, weight [V] fp32; items = blocks of BR rows; BV >= V, a power of two."""
    column = tl.arange(0, BV)
    scale = tl.load(weight + column, mask=column < V, other=0.0)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        block = item + 0
        first = block.to(tl.int64) * BR
        down = tl.arange(0, BR)
        inside = (block * BR + down < rows)[:, None] & (column < V)[None, :]
        at = down[:, None] * V + column[None, :]
        x = tl.load(o + first * V + at, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(gate + first * V + at, mask=inside, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(x * x, 1) / V + eps)
        y = x * root[:, None] * scale[None, :] / (1.0 + tl.exp(-z))
        tl.store(out + first * V + at, y.to(out.dtype.element_ty), mask=inside)
