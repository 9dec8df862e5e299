"""MXFP4 codes in vector instructions: 32 codes become floats without a table, and meet rows of x at once.

A block is 32 codes in 16 bytes (the low nibble comes first) with one power-of-two scale. Twice the magnitude
of code c is c + max(c - 4, 0) + 2 [c = 7] for c = 0 .. 7, so bytes are decoded 16 at a time by adds and
compares, on any machine. Inputs come in split form: the even elements of a block, then the odd ones, as they
meet the low and the high nibbles; `split_halves` makes it.

Source: OCP Microscaling Formats 1.0, E2M1 and E8M0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.errors import TypingError

from sglang_k3.kernels.mx.reference import BLOCK, E8M0
from sglang_k3.kernels.row_math import LANES, add_lanes
from sglang_k3.kernels.row_vectors import intrinsic, over, spread

HALF = BLOCK // 2
HALF_SCALES = np.array(E8M0, dtype=np.float32) * np.float32(0.5)
"""Scale by E8M0 byte, halved: codes are decoded to twice their value. Byte 255 is NaN."""

_BYTES = ir.VectorType(ir.IntType(8), HALF)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)


def _bytes(value: int) -> ir.Constant:
    return ir.Constant(_BYTES, [value] * HALF)


def _twice(builder: ir.IRBuilder, codes: Any) -> Any:
    """Emit: 16 codes (0 .. 15) -> twice their values, signed bytes."""
    size = builder.and_(codes, _bytes(7))
    beyond = builder.sub(size, _bytes(4))
    beyond = builder.select(builder.icmp_signed(">", beyond, _bytes(0)), beyond, _bytes(0))
    last = builder.select(builder.icmp_signed(">", size, _bytes(6)), _bytes(2), _bytes(0))
    doubled = builder.add(builder.add(size, beyond), last)
    negative = builder.icmp_signed(">", codes, _bytes(7))
    return builder.select(negative, builder.sub(_bytes(0), doubled), doubled)


def _as_floats(builder: ir.IRBuilder, values: Any) -> list[Any]:
    """Emit: 16 signed bytes -> two vectors of LANES floats."""
    parts = []
    for start in range(0, HALF, LANES):
        picks = ir.Constant(_WORDS, [start + lane for lane in range(LANES)])
        part = builder.shuffle_vector(values, ir.Constant(_BYTES, ir.Undefined), picks)
        parts.append(builder.sitofp(builder.sext(part, _WORDS), _FLOATS))
    return parts


def _decode(builder: ir.IRBuilder, packed: Any, index: Any) -> list[Any]:
    """Emit: the block at byte `index` -> four vectors of doubled values, in the order of the split form."""
    codes = builder.load(builder.bitcast(builder.gep(packed, [index]), _BYTES.as_pointer()), align=1)
    low = builder.and_(codes, _bytes(15))
    high = builder.lshr(codes, _bytes(4))
    return [v for part in (low, high) for v in _as_floats(builder, _twice(builder, part))]


def _pointer(context: Any, builder: ir.IRBuilder, kind: Any, value: Any) -> Any:
    return context.make_array(kind)(context, builder, value).data


def _check(packed: Any, scale: Any, floats: tuple[Any, ...]) -> None:
    wanted = [(packed, types.uint8), (scale, types.uint8), *((kind, types.float32) for kind in floats)]
    for kind, dtype in wanted:
        if not (isinstance(kind, types.Array) and kind.layout == "C" and kind.dtype == dtype):
            raise TypingError(f"MXFP4 kernels need contiguous arrays of bytes and fp32, got {kind}")


def _dots(rows: int) -> Any:
    """An intrinsic for `rows` rows of x."""

    def dots(
        typing_context: Any,
        packed: Any,
        byte: Any,
        scale: Any,
        first: Any,
        table: Any,
        x: Any,
        row: Any,
        blocks: Any,
    ) -> Any:
        _check(packed, scale, (table, x))

        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            kinds = signature.args
            codes = builder.gep(_pointer(context, builder, kinds[0], arguments[0]), [arguments[1]])
            scales = builder.gep(_pointer(context, builder, kinds[2], arguments[2]), [arguments[3]])
            factors = _pointer(context, builder, kinds[4], arguments[4])
            inputs = _pointer(context, builder, kinds[5], arguments[5])
            start, count = arguments[6:]
            width = builder.mul(count, ir.Constant(count.type, BLOCK))
            starts = [
                builder.gep(inputs, [builder.mul(builder.add(start, ir.Constant(start.type, r)), width)])
                for r in range(rows)
            ]

            def step(block: Any, sums: list[Any]) -> list[Any]:
                values = _decode(builder, codes, builder.mul(block, ir.Constant(block.type, HALF)))
                place: Any = builder.mul(block, ir.Constant(block.type, BLOCK))
                byte_of_scale = builder.zext(builder.load(builder.gep(scales, [block])), block.type)
                factor = spread(builder, builder.load(builder.gep(factors, [byte_of_scale])))
                following = []
                for pointer, total in zip(starts, sums, strict=True):
                    inside: Any = None
                    for part, value in enumerate(values):
                        at = builder.add(place, ir.Constant(place.type, part * LANES))
                        vector = builder.bitcast(builder.gep(pointer, [at]), _FLOATS.as_pointer())
                        product = builder.fmul(value, builder.load(vector, align=4))
                        inside = product if inside is None else builder.fadd(inside, product)
                    following.append(builder.fadd(total, builder.fmul(inside, factor)))
                return following

            zero = ir.Constant(_FLOATS, [0.0] * LANES)
            totals = [add_lanes(builder, total) for total in over(builder, count, 1, [zero] * rows, step)]
            return totals[0] if rows == 1 else context.make_tuple(builder, signature.return_type, totals)

        result = types.float32 if rows == 1 else types.UniTuple(types.float32, rows)
        return result(packed, byte, scale, first, table, x, row, blocks), codegen

    dots.__doc__ = f"""The product of one packed row with {rows} row(s) of x: fp32, or a tuple of them.

    packed, scale: contiguous bytes of any shape; the row starts at byte `byte` and at scale `first` and has
    `blocks` blocks. table: `HALF_SCALES`. x [R, 32 * blocks] fp32 in split form; rows row .. row +
    {rows - 1}. A row's sum runs over the blocks in order in LANES lanes, so its bits do not depend on the
    rows beside it.
    """
    return intrinsic(dots)


dot_1 = _dots(1)
dots_4 = _dots(4)


@intrinsic
def unpack_row(
    typing_context: Any,
    packed: Any,
    byte: Any,
    scale: Any,
    first: Any,
    table: Any,
    out: Any,
    place: Any,
    blocks: Any,
) -> Any:
    """Write one packed row as fp32 to the flat array out[place ...], in split form; arguments as above."""
    _check(packed, scale, (table, out))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        codes = builder.gep(_pointer(context, builder, kinds[0], arguments[0]), [arguments[1]])
        scales = builder.gep(_pointer(context, builder, kinds[2], arguments[2]), [arguments[3]])
        factors = _pointer(context, builder, kinds[4], arguments[4])
        target = builder.gep(_pointer(context, builder, kinds[5], arguments[5]), [arguments[6]])

        def step(block: Any, sums: list[Any]) -> list[Any]:
            values = _decode(builder, codes, builder.mul(block, ir.Constant(block.type, HALF)))
            at: Any = builder.mul(block, ir.Constant(block.type, BLOCK))
            byte_of_scale = builder.zext(builder.load(builder.gep(scales, [block])), block.type)
            factor = spread(builder, builder.load(builder.gep(factors, [byte_of_scale])))
            for part, value in enumerate(values):
                position = builder.add(at, ir.Constant(at.type, part * LANES))
                vector = builder.bitcast(builder.gep(target, [position]), _FLOATS.as_pointer())
                builder.store(builder.fmul(value, factor), vector, align=4)
            return sums

        over(builder, arguments[7], 1, [], step)
        return context.get_dummy_value()

    return types.void(packed, byte, scale, first, table, out, place, blocks), codegen


@njit(cache=True, nogil=True, error_model="numpy")
def split_halves(x: np.ndarray, out: np.ndarray) -> None:
    """x [R, C] -> out [R, C] in split form: of each 32, the even elements first. C a multiple of 32."""
    for r in range(x.shape[0]):
        for start in range(0, x.shape[1], BLOCK):
            for i in range(HALF):
                out[r, start + i] = x[r, start + 2 * i]
                out[r, start + HALF + i] = x[r, start + 2 * i + 1]
