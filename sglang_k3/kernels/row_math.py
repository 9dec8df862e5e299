"""Scalar and row arithmetic for exact CPU kernels: every result's bits are fixed by the source order.

torch's vectorised exp differs between a vector's body and its tail, and its reductions split by size, so a
row's bits would depend on its neighbours. Here each function sees one row (or one number) and spells out the
order of its sums and where a product is fused into one (`fma`, one instruction for two and one rounding);
numba without fastmath neither contracts multiply-adds by itself nor reorders.

numba caches a kernel with the functions it calls compiled in, and looks at the kernel's own file only:
after an edit here delete the caches (`__pycache__/*.nbi`). Kernels that divide need error_model="numpy":
Python's check for a zero divisor is a branch that keeps a loop from being vectorised.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import get_or_insert_function
from numba.core.errors import TypingError
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import overload

from sglang_k3.kernels.native import native_bf16
from sglang_k3.kernels.registry import Call

intrinsic: Any = numba_intrinsic
"""numba passes the typing context itself, which a type checker takes for a missing argument."""

LANES = 8
"""A dot product keeps this many running sums: part of its definition, whatever the machine's vectors."""

_ZERO = np.float32(0)
_HALF = np.float32(0.5)
_ONE = np.float32(1)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_EXP_FLOOR = np.float32(-87.33654)
_EXP_CEILING = np.float32(88.72283)
_INFINITY = np.float32(np.inf)
# Minimax coefficients of (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2, highest power first.
_EXP_5 = np.float32(1.9875691500e-4)
_EXP_4 = np.float32(1.3981999507e-3)
_EXP_3 = np.float32(8.3334519073e-3)
_EXP_2 = np.float32(4.1665795894e-2)
_EXP_1 = np.float32(1.6666665459e-1)
_EXP_0 = np.float32(5.0000001201e-1)
_TWO = np.float32(2)
_ODD_3, _ODD_5, _ODD_7, _ODD_9, _ODD_11, _ODD_13, _ODD_15 = (np.float32(1 / n) for n in range(3, 16, 2))
_BIAS = np.int32(127)
_MANTISSA_BITS = np.int32(23)


def fp32_or_bf16(call: Call) -> str | None:
    """A registry `supports` rule: these kernels compute in fp32, and read and write fp32 or bf16."""
    if call.dtype in (torch.float32, torch.bfloat16):
        return None
    return f"computes float32 and bfloat16, not {call.dtype}"


def fp32_only(call: Call) -> str | None:
    """A `supports` rule of exact kernels that sum in fp32 in a fixed order."""
    return None if call.dtype == torch.float32 else f"row order is kept in float32, not {call.dtype}"


def fp32_or_plain_bf16(call: Call) -> str | None:
    """A `supports` rule of kernels that widen bf16: not for a CPU that multiplies it natively."""
    if call.dtype == torch.bfloat16 and native_bf16():
        return "this CPU multiplies bfloat16 matrices itself"
    return fp32_or_bf16(call)


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """A numpy view of a contiguous CPU tensor; bfloat16 appears as its uint16 bits. Writes go through.

    Raises ValueError for a tensor that is not contiguous: kernels would be compiled again for it.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"a pool must be contiguous, got strides {tensor.stride()} for {tuple(tensor.shape)}"
        )
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def float_rows(tensor: torch.Tensor) -> np.ndarray:
    """fp32, C-contiguous numpy rows of a CPU tensor (no copy when it already is that)."""
    # Each call into torch costs a microsecond, and a decode step asks some hundred times.
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype != torch.float32:
        tensor = tensor.float()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.numpy()


@intrinsic
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in fp32, rounded once."""
    if not a == b == c == types.float32:
        raise TypingError(f"fma takes fp32 numbers, got {a}, {b} and {c}")

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return fused(builder, *arguments)

    return types.float32(a, b, c), codegen


@njit(cache=True, nogil=True, error_model="numpy")
def exp(x: np.float32) -> np.float32:
    """e^x in fp32 within 2 units in the last place; 0 below -87.3 (no subnormals), inf above 88.7."""
    power = np.floor(x * _LOG2_E + _HALF)
    r = fma(power, -_LN2_HIGH, x)
    r = fma(power, -_LN2_LOW, r)
    tail = fma(fma(fma(_EXP_5, r, _EXP_4), r, _EXP_3), r, _EXP_2)
    tail = fma(fma(tail, r, _EXP_1), r, _EXP_0)
    mantissa = fma(tail, r * r, r) + _ONE
    # Two factors, because 2^128 (x just under the ceiling) is not a fp32 number.
    exponent = np.int32(power)
    half = exponent >> np.int32(1)
    first = np.int32((half + _BIAS) << _MANTISSA_BITS).view(np.float32)
    second = np.int32((exponent - half + _BIAS) << _MANTISSA_BITS).view(np.float32)
    y = mantissa * first * second
    if x < _EXP_FLOOR:
        y = _ZERO
    if x > _EXP_CEILING:
        y = _INFINITY
    if x != x:
        y = x
    return y


@njit(cache=True, nogil=True, error_model="numpy")
def sigmoid(x: np.float32) -> np.float32:
    """1 / (1 + e^-x) in fp32."""
    return _ONE / (_ONE + exp(-x))


@njit(cache=True, nogil=True, error_model="numpy")
def softplus(x: np.float32) -> np.float32:
    """log(1 + e^x) in fp32, as max(x, 0) + log(1 + e^-|x|)."""
    y = exp(-abs(x))
    # log(1 + y) = 2 artanh(s); s <= 1/3, so eight terms of the odd series reach fp32's last place.
    s = y / (_TWO + y)
    z = s * s
    series = (((((_ODD_15 * z + _ODD_13) * z + _ODD_11) * z + _ODD_9) * z + _ODD_7) * z + _ODD_5) * z
    series = (series + _ODD_3) * z + _ONE
    return max(x, _ZERO) + _TWO * s * series


def fused(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """Emit a * b + c, rounded once, of numbers or of vectors of LANES."""
    kind = a.type
    name = "llvm.fma.f32" if isinstance(kind, ir.FloatType) else f"llvm.fma.v{kind.count}f32"
    signature = ir.FunctionType(kind, [kind] * 3)
    return builder.call(get_or_insert_function(builder.module, signature, name), [a, b, c])


def add_lanes(builder: ir.IRBuilder, sums: Any) -> Any:
    """Emit the end of a dot product: lane j adds lane j + half, halving until one is left."""
    value: Any = sums
    width = LANES
    while width > 1:
        width //= 2
        picks = ir.VectorType(ir.IntType(32), width)
        low, high = (
            builder.shuffle_vector(
                value,
                ir.Constant(value.type, ir.Undefined),
                ir.Constant(picks, [start + j for j in range(width)]),
            )
            for start in (0, width)
        )
        value = builder.fadd(low, high)
    return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))


@intrinsic
def _lane_sums(typing_context: Any, a: Any, b: Any, count: Any) -> Any:
    """sum of a[i] * b[i] over i < count (a multiple of LANES): lane j adds the i = j mod LANES in order,
    then `add_lanes`. Spelled in vector instructions because numba can't keep an array of running sums in
    registers."""
    if not all(isinstance(x, types.Array) and x.layout == "C" and x.dtype == types.float32 for x in (a, b)):
        raise TypingError(f"dot needs contiguous fp32 vectors, got {a} and {b}")

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        lanes = ir.VectorType(ir.FloatType(), LANES)
        pointers = [
            context.make_array(kind)(context, builder, value).data
            for kind, value in zip(signature.args[:2], arguments[:2], strict=True)
        ]
        end = arguments[2]
        before = builder.block
        test = builder.append_basic_block("lanes.test")
        body = builder.append_basic_block("lanes.body")
        after = builder.append_basic_block("lanes.after")
        builder.branch(test)

        builder.position_at_end(test)
        index = builder.phi(end.type)
        sums = builder.phi(lanes)
        index.add_incoming(ir.Constant(end.type, 0), before)
        sums.add_incoming(ir.Constant(lanes, [0.0] * LANES), before)
        builder.cbranch(builder.icmp_signed("<", index, end), body, after)

        builder.position_at_end(body)
        x, y = (
            builder.load(builder.bitcast(builder.gep(p, [index]), lanes.as_pointer()), align=4)
            for p in pointers
        )
        sums.add_incoming(fused(builder, x, y, sums), body)
        index.add_incoming(builder.add(index, ir.Constant(end.type, LANES)), body)
        builder.branch(test)

        builder.position_at_end(after)
        return add_lanes(builder, sums)

    return types.float32(a, b, count), codegen


@njit(cache=True, nogil=True, error_model="numpy")
def dot(a: np.ndarray, b: np.ndarray) -> np.float32:
    """a . b of two contiguous fp32 vectors [n]: LANES running sums over the whole blocks, then the
    remaining products in order."""
    whole = a.shape[0] - a.shape[0] % LANES
    total = _lane_sums(a, b, whole)
    for i in range(whole, a.shape[0]):
        total = fma(a[i], b[i], total)
    return total


def widen(row: Any, out: Any) -> None:
    """Inside numba: out (fp32, same length) = the row, which holds fp32 or bf16 bits."""
    raise NotImplementedError("only inside numba code")


def narrow(values: Any, row: Any) -> None:
    """Inside numba: the inverse of `widen`; bf16 rounds to nearest even as torch does."""
    raise NotImplementedError("only inside numba code")


_HALF_WORD = np.uint32(16)
_BELOW_HALF = np.uint32(0x7FFF)
_LAST_BIT = np.uint32(1)
_BF16_NAN = np.uint16(0x7FC0)


@overload(widen, jit_options={"cache": True})
def _widen(row, out):
    if row.dtype == types.float32:

        def copy(row, out):
            for i in range(row.shape[0]):
                out[i] = row[i]

        return copy

    def from_bits(row, out):
        for i in range(row.shape[0]):
            out[i] = np.uint32(np.uint32(row[i]) << _HALF_WORD).view(np.float32)

    return from_bits


@overload(narrow, jit_options={"cache": True})
def _narrow(values, row):
    if row.dtype == types.float32:

        def copy(values, row):
            for i in range(row.shape[0]):
                row[i] = values[i]

        return copy

    def to_bits(values, row):
        for i in range(row.shape[0]):
            bits = np.float32(values[i]).view(np.uint32)
            rounded = np.uint32(bits + _BELOW_HALF + ((bits >> _HALF_WORD) & _LAST_BIT)) >> _HALF_WORD
            row[i] = np.uint16(rounded) if values[i] == values[i] else _BF16_NAN

    return to_bits
