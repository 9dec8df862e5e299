"""SiTU and SiLU gating in Triton for Ascend's vector cores. Not run on hardware."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _clipped(x, bound):
    """bound * tanh(x / bound), by way of one exponential that cannot give NaN: it ends in 0 or infinity."""
    return bound * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * x / bound)))


@triton.jit
def gated(
    gate_up,
    out,
    beta,
    linear_beta,
    items,
    row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CLIP: tl.constexpr,
    CLIP_UP: tl.constexpr,
):
    """gate_up [T, 2 WIDTH] with row stride `row` -> out [T, WIDTH]; items = T * blocks of BLOCK columns.
    CLIP: SiTU, otherwise SiLU. CLIP_UP: `up` is clipped too."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        token = item // BLOCKS
        t = token.to(tl.int64)
        column = (item % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        gate = tl.load(gate_up + t * row + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + t * row + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-gate))
        if CLIP:
            gate = _clipped(gate, beta)
        if CLIP_UP:
            up = _clipped(up, linear_beta)
        tl.store(out + t * WIDTH + column, (gate * share * up).to(out.dtype.element_ty), mask=inside)
