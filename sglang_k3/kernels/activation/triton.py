"""SiTU and SiLU gating in Triton for Ascend's vector cores, also with its output quantised again.

Codes are made by integer arithmetic, which is exact anywhere and needs no conversion that a chip may lack; as
bytes they are signed, so that it does not matter whether narrowing wraps or saturates. Not run on hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALLEST = tl.constexpr(1e-10)
"""reference.SMALLEST; a kernel may read a constexpr of its module alone."""
LARGEST = tl.constexpr(3.4028234663852886e38)
NOT_A_NUMBER = tl.constexpr(float("nan"))


@triton.jit
def _clipped(x, bound):
    """bound * tanh(x / bound), by way of one exponential that cannot give NaN: it ends in 0 or infinity."""
    return bound * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * x / bound)))


@triton.jit
def _activated(gate, up, beta, linear_beta, CLIP: tl.constexpr, CLIP_UP: tl.constexpr):
    """CLIP: SiTU, otherwise SiLU. CLIP_UP: `up` is clipped too."""
    share = 1.0 / (1.0 + tl.exp(-gate))
    if CLIP:
        gate = _clipped(gate, beta)
    if CLIP_UP:
        up = _clipped(up, linear_beta)
    return gate * share * up


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
    """gate_up [T, 2 WIDTH] with row stride `row` -> out [T, WIDTH]; items = T * blocks of BLOCK columns."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        token = item // BLOCKS
        t = token.to(tl.int64)
        column = (item % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        gate = tl.load(gate_up + t * row + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + t * row + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        answer = _activated(gate, up, beta, linear_beta, CLIP, CLIP_UP)
        tl.store(out + t * WIDTH + column, answer.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _e4m3(x):
    """The bytes, as i32 from -128 on, of fp32 x in E4M3: |x| <= 448, to nearest, ties to even."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    # Three of 23 mantissa bits stay, and the exponent's bias goes from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes count steps of 2^-9, which are the last bits of a sum with 2^14.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    return tl.where(x.to(tl.int32, bitcast=True) < 0, code - 128, code)


@triton.jit
def gated_mxfp8(
    gate_up,
    codes,
    scales,
    beta,
    linear_beta,
    items,
    row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CLIP: tl.constexpr,
    CLIP_UP: tl.constexpr,
):
    """`gated` in MXFP8: codes [T, WIDTH] i8, the bytes of E4M3; scales [T, WIDTH / 32] i8, those of E8M0."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    GROUPS: tl.constexpr = BLOCK // 32
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        token = item // BLOCKS
        t = token.to(tl.int64)
        group = (item % BLOCKS) * GROUPS + tl.arange(0, GROUPS)
        there = group < WIDTH // 32
        column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        gate = tl.load(gate_up + t * row + column, mask=there[:, None], other=0.0).to(tl.float32)
        up = tl.load(gate_up + t * row + WIDTH + column, mask=there[:, None], other=0.0).to(tl.float32)
        x = _activated(gate, up, beta, linear_beta, CLIP, CLIP_UP)
        # A comparison with NaN is false, whatever a maximum makes of it.
        finite = tl.abs(x) <= LARGEST
        broken = tl.max(tl.where(finite, 0.0, 1.0), 1) > 0.0
        size = tl.maximum(tl.max(tl.abs(tl.where(finite, x, 0.0)), 1), SMALLEST)
        # The next power of two over size / 448: 448 is 1.75 * 2^8, and a larger mantissa carries.
        power = ((size.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
        inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
        code = _e4m3(tl.where(broken[:, None], 0.0, x * inverse[:, None]))
        tl.store(codes + t * WIDTH + column, code.to(tl.int8), mask=there[:, None])
        byte = tl.where(broken, 255, power)
        byte = tl.where(byte > 127, byte - 256, byte)
        tl.store(scales + t * (WIDTH // 32) + group, byte.to(tl.int8), mask=there)


@triton.jit
def gated_int8(
    gate_up,
    codes,
    scales,
    beta,
    linear_beta,
    items,
    row,
    WIDTH: tl.constexpr,
    BW: tl.constexpr,
    CLIP: tl.constexpr,
    CLIP_UP: tl.constexpr,
):
    """`gated` in INT8 with a scale a token: codes [T, WIDTH] i8, scales [T] fp32; items = T, a row a tile."""
    column = tl.arange(0, BW)
    inside = column < WIDTH
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        token = item + 0
        t = token.to(tl.int64)
        gate = tl.load(gate_up + t * row + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + t * row + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        x = _activated(gate, up, beta, linear_beta, CLIP, CLIP_UP)
        finite = tl.abs(x) <= LARGEST
        broken = tl.max(tl.where(finite, 0.0, 1.0), 0) > 0.0
        size = tl.maximum(tl.max(tl.abs(tl.where(finite, x, 0.0)), 0), SMALLEST)
        scale = size / 127.0
        # The last bits of a sum with 1.5 * 2^23 are the nearest whole number, ties to even.
        steps = tl.where(broken, 0.0, x / scale) + 12582912.0
        code = steps.to(tl.int32, bitcast=True) - 0x4B400000
        tl.store(codes + t * WIDTH + column, code.to(tl.int8), mask=inside)
        tl.store(scales + t, tl.where(broken, NOT_A_NUMBER, scale))
