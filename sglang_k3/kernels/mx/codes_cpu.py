"""MXFP4 codes in vector instructions: a code's bits are put where half precision has them, and widened.

A block is 32 codes in 16 bytes (the low nibble comes first) with one power-of-two scale. E2M1 is half
precision with fewer bits: its sign, two exponent bits and one mantissa bit, moved to the places of half
precision's, are the value times 2^-14, subnormals included, and CPUs widen eight halves in one instruction.
Inputs come in split form, as the four nibbles of a 16-bit word are taken in turn: of each 32 elements those
that are 0 mod 4, then 1, 2 and 3 mod 4; `split_quarters` makes it.

Source: OCP Microscaling Formats 1.0, E2M1 and E8M0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.errors import TypingError

from sglang_k3.kernels.mx.reference import BLOCK, E8M0
from sglang_k3.kernels.row_math import LANES, add_lanes, fused, intrinsic
from sglang_k3.kernels.row_vectors import over, spread

HALF = BLOCK // 2
QUARTER = BLOCK // 4
SCALES = np.array(E8M0, dtype=np.float32)
"""Scale by E8M0 byte. Byte 255 is NaN."""

_WORDS = ir.VectorType(ir.IntType(16), QUARTER)
_HALVES = ir.VectorType(ir.HalfType(), QUARTER)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_SIGN, _MAGNITUDE = 0x8000, 0x0E00
_RESTORE = ir.Constant(_FLOATS, [2.0**14] * LANES)
"""The exponent bias of half precision over E2M1's."""


def _moved(builder: ir.IRBuilder, words: Any, left: int, mask: int) -> Any:
    """Emit: the words' bits `left` places to the left (negative: to the right), masked."""
    places = ir.Constant(_WORDS, [abs(left)] * QUARTER)
    bits = builder.shl(words, places) if left >= 0 else builder.lshr(words, places)
    return builder.and_(bits, ir.Constant(_WORDS, [mask] * QUARTER))


def _decode(builder: ir.IRBuilder, packed: Any, index: Any) -> list[Any]:
    """Emit: the block at byte `index` -> four vectors of values times 2^-14, in the split form's order."""
    words = builder.load(builder.bitcast(builder.gep(packed, [index]), _WORDS.as_pointer()), align=1)
    values = []
    for nibble in range(4):
        sign = _moved(builder, words, 12 - 4 * nibble, _SIGN)
        magnitude = _moved(builder, words, 9 - 4 * nibble, _MAGNITUDE)
        halves = builder.bitcast(builder.or_(sign, magnitude), _HALVES)
        values.append(builder.fpext(halves, _FLOATS))
    return values


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
                        x = builder.load(vector, align=4)
                        inside = (
                            builder.fmul(value, x) if inside is None else fused(builder, value, x, inside)
                        )
                    inside = builder.fmul(inside, _RESTORE)
                    following.append(fused(builder, inside, factor, total))
                return following

            zero = ir.Constant(_FLOATS, [0.0] * LANES)
            totals = [add_lanes(builder, total) for total in over(builder, count, 1, [zero] * rows, step)]
            return totals[0] if rows == 1 else context.make_tuple(builder, signature.return_type, totals)

        result = types.float32 if rows == 1 else types.UniTuple(types.float32, rows)
        return result(packed, byte, scale, first, table, x, row, blocks), codegen

    dots.__doc__ = f"""The product of one packed row with {rows} row(s) of x: fp32, or a tuple of them.

    packed, scale: contiguous bytes of any shape; the row starts at byte `byte` and at scale `first` and has
    `blocks` blocks. table: `SCALES`. x [R, 32 * blocks] fp32 in split form; rows row .. row +
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
                builder.store(builder.fmul(builder.fmul(value, _RESTORE), factor), vector, align=4)
            return sums

        over(builder, arguments[7], 1, [], step)
        return context.get_dummy_value()

    return types.void(packed, byte, scale, first, table, out, place, blocks), codegen


@njit(cache=True, nogil=True, error_model="numpy")
def split_quarters(x: np.ndarray, out: np.ndarray) -> None:
    """x [R, C] -> out [R, C] in split form. C a multiple of 32."""
    for r in range(x.shape[0]):
        for start in range(0, x.shape[1], BLOCK):
            for i in range(QUARTER):
                for nibble in range(4):
                    out[r, start + QUARTER * nibble + i] = x[r, start + 4 * i + nibble]


@njit(cache=True, nogil=True, error_model="numpy")
def split_place(column):
    """Where a column stands in the split form."""
    inside = column % BLOCK
    return column - inside + inside // 4 + QUARTER * (inside % 4)
