"""Vector instructions for several rows at once: what numba's loops cannot be made to keep in registers.

One row at a time leaves the adders waiting for one another, and loads its operands again for every row. Here
ROWS rows go together, each with its own running sums in the order that `row_math.dot` defines, so the bits of
a row do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import TypingError

from sglang_k3.kernels.row_math import LANES, add_lanes, fused, intrinsic

ROWS = 4
"""Rows worked on together: their sums and two vectors of operands fit 16 registers."""

_LINE = 16
"""fp32 numbers of a cache line."""

_VECTOR = ir.VectorType(ir.FloatType(), LANES)


def need_fp32(**arrays: Any) -> None:
    for name, kind in arrays.items():
        if not (isinstance(kind, types.Array) and kind.layout == "C" and kind.dtype == types.float32):
            raise TypingError(f"{name} must be contiguous fp32, got {kind}")


def need_matrix(kind: Any) -> None:
    if not (
        isinstance(kind, types.Array) and kind.layout == "C" and kind.dtype in (types.float32, types.uint16)
    ):
        raise TypingError(f"a matrix must be contiguous fp32 or bf16 bits, got {kind}")


def over(
    builder: ir.IRBuilder, count: Any, stride: int, starts: list[Any], step: Callable[..., list[Any]]
) -> list[Any]:
    """Emit a loop over i = 0, stride, ... < count; step(i, values) -> values. Returns the last ones."""
    before = builder.block
    test, body, after = (builder.append_basic_block(f"over.{part}") for part in ("test", "body", "after"))
    builder.branch(test)
    builder.position_at_end(test)
    index = builder.phi(count.type)
    index.add_incoming(ir.Constant(count.type, 0), before)
    values = []
    for start in starts:
        value = builder.phi(start.type)
        value.add_incoming(start, before)
        values.append(value)
    builder.cbranch(builder.icmp_signed("<", index, count), body, after)
    builder.position_at_end(body)
    for value, following in zip(values, step(index, values), strict=True):
        value.add_incoming(following, builder.block)
    index.add_incoming(builder.add(index, ir.Constant(count.type, stride)), builder.block)
    builder.branch(test)
    builder.position_at_end(after)
    return values


def _vector_at(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [index]), _VECTOR.as_pointer())


def load_lanes(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    return builder.load(_vector_at(builder, pointer, index), align=4)


def store_lanes(builder: ir.IRBuilder, value: Any, pointer: Any, index: Any) -> None:
    builder.store(value, _vector_at(builder, pointer, index), align=4)


def pointers_of(context: Any, builder: ir.IRBuilder, kinds: Any, values: Any) -> list[Any]:
    return [
        context.make_array(kind)(context, builder, value).data
        for kind, value in zip(kinds, values, strict=True)
    ]


def spread(builder: ir.IRBuilder, scalar: Any) -> Any:
    """A vector with the scalar in every lane."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(one, undefined, lanes)


def _row_starts(builder: ir.IRBuilder, state: Any, first: Any, width: Any) -> list[Any]:
    """Pointers to rows first .. first + ROWS - 1 of a matrix with rows of `width` numbers."""
    rows = [builder.add(first, ir.Constant(first.type, r)) for r in range(ROWS)]
    return [builder.gep(state, [builder.mul(row, width)]) for row in rows]


def _load_wide(builder: ir.IRBuilder, kind: Any, pointer: Any, index: Any) -> Any:
    """LANES numbers as fp32, from fp32 or from bf16 bits."""
    if kind.dtype == types.float32:
        return load_lanes(builder, pointer, index)
    halves, words = (ir.VectorType(ir.IntType(bits), LANES) for bits in (16, 32))
    place = builder.bitcast(builder.gep(pointer, [index]), halves.as_pointer())
    bits = builder.zext(builder.load(place, align=2), words)
    return builder.bitcast(builder.shl(bits, ir.Constant(words, [16] * LANES)), _VECTOR)


def _sums(builder: ir.IRBuilder, kind: Any, rows: list[Any], operands: list[Any], count: Any) -> list[Any]:
    """Emit one sum for each of ROWS rows of a matrix of this kind and each operand, over `count` numbers."""

    def step(index: Any, sums: list[Any]) -> list[Any]:
        loaded = [load_lanes(builder, pointer, index) for pointer in operands]
        following = []
        for r, row in enumerate(rows):
            x = _load_wide(builder, kind, row, index)
            for o, operand in enumerate(loaded):
                following.append(fused(builder, x, operand, sums[len(operands) * r + o]))
        return following

    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    sums = over(builder, count, LANES, [zero] * (len(operands) * ROWS), step)
    return [add_lanes(builder, value) for value in sums]


def _products(context: Any, builder: ir.IRBuilder, kinds: Any, values: Any) -> list[Any]:
    """Emit the sums of `dots` and `matrix_dots`. values: matrix, first, width, the operands, count."""
    matrix, *operands = pointers_of(context, builder, [kinds[0], *kinds[3:-1]], [values[0], *values[3:-1]])
    rows = _row_starts(builder, matrix, values[1], values[2])
    return _sums(builder, kinds[0], rows, operands, values[-1])


def _from_table(context: Any, builder: ir.IRBuilder, kind: Any, values: Any, width: Any) -> list[Any]:
    """Emit pointers to rows of a table. values: the table and the rows' numbers."""
    table, *numbers = values
    (pointer,) = pointers_of(context, builder, [kind], [table])
    return [builder.gep(pointer, [builder.mul(number, width)]) for number in numbers]


@intrinsic
def dots(typing_context: Any, matrix: Any, first: Any, width: Any, a: Any, b: Any, count: Any) -> Any:
    """ROWS pairs (row . a, row . b) over the first `count` numbers (a multiple of LANES) of each row.

    matrix [n, width] fp32 or bf16 bits (uint16), a, b [width] fp32, all contiguous; rows first .. first +
    ROWS - 1.
    """
    need_fp32(a=a, b=b)
    need_matrix(matrix)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        totals = _products(context, builder, signature.args, arguments)
        return context.make_tuple(builder, signature.return_type, totals)

    return types.UniTuple(types.float32, 2 * ROWS)(matrix, first, width, a, b, count), codegen


@intrinsic
def matrix_dots(typing_context: Any, matrix: Any, first: Any, width: Any, a: Any, count: Any) -> Any:
    """The same with one operand: ROWS fp32."""
    need_fp32(a=a)
    need_matrix(matrix)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        totals = _products(context, builder, signature.args, arguments)
        return context.make_tuple(builder, signature.return_type, totals)

    return types.UniTuple(types.float32, ROWS)(matrix, first, width, a, count), codegen


@intrinsic
def table_dots(
    typing_context: Any, matrix: Any, first: Any, width: Any, table: Any, a: Any, b: Any, count: Any
) -> Any:
    """`dots` with rows a and b of a table [n, width]. (A row cut out in numba counts references: two atomic
    additions, as much as the products of a row.)"""
    need_fp32(table=table)
    need_matrix(matrix)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        operands = _from_table(context, builder, signature.args[3], arguments[3:6], arguments[2])
        (pointer,) = pointers_of(context, builder, signature.args[:1], arguments[:1])
        rows = _row_starts(builder, pointer, arguments[1], arguments[2])
        totals = _sums(builder, signature.args[0], rows, operands, arguments[6])
        return context.make_tuple(builder, signature.return_type, totals)

    return types.UniTuple(types.float32, 2 * ROWS)(matrix, first, width, table, a, b, count), codegen


@intrinsic
def table_matrix_dots(
    typing_context: Any, matrix: Any, first: Any, width: Any, table: Any, a: Any, count: Any
) -> Any:
    """`matrix_dots` with row a of a table [n, width]."""
    need_fp32(table=table)
    need_matrix(matrix)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        operands = _from_table(context, builder, signature.args[3], arguments[3:5], arguments[2])
        (pointer,) = pointers_of(context, builder, signature.args[:1], arguments[:1])
        rows = _row_starts(builder, pointer, arguments[1], arguments[2])
        totals = _sums(builder, signature.args[0], rows, operands, arguments[5])
        return context.make_tuple(builder, signature.return_type, totals)

    return types.UniTuple(types.float32, ROWS)(matrix, first, width, table, a, count), codegen


def prefetch_line(builder: ir.IRBuilder, pointer: Any, offset: Any) -> None:
    """Emit a request for the cache line at an element of an array; an address behind its end is ignored."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    flags = [ir.Constant(number, flag) for flag in (0, 3, 1)]  # to read, keep in every cache, data
    builder.call(prefetch, [builder.bitcast(builder.gep(pointer, [offset]), byte), *flags])


def _decay_and_add(
    builder: ir.IRBuilder, rows: list[Any], operands: list[Any], factors: Any, count: Any, also
):
    """Emit row <- fma(row, decay, u_r * k) for ROWS rows; also(index) is emitted once a step of LANES."""
    factor_lanes = [spread(builder, builder.extract_value(factors, r)) for r in range(ROWS)]

    def step(index: Any, values: list[Any]) -> list[Any]:
        d, key = (load_lanes(builder, place, index) for place in operands)
        also(index)
        for row, factor in zip(rows, factor_lanes, strict=True):
            following = fused(builder, load_lanes(builder, row, index), d, builder.fmul(factor, key))
            store_lanes(builder, following, row, index)
        return values

    over(builder, count, LANES, [], step)


@intrinsic
def table_decay_and_add(
    typing_context: Any,
    state: Any,
    first: Any,
    width: Any,
    table: Any,
    decay: Any,
    k: Any,
    u: Any,
    count: Any,
) -> Any:
    """row <- row * decay + u_r * k over the first `count` numbers of ROWS rows; u a tuple of ROWS fp32.

    decay, k: rows of the table [n, width]. The sum is fused: fma(row, decay, u_r * k).
    """
    need_fp32(state=state, table=table)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        operands = _from_table(context, builder, signature.args[3], arguments[3:6], arguments[2])
        (pointer,) = pointers_of(context, builder, signature.args[:1], arguments[:1])
        rows = _row_starts(builder, pointer, arguments[1], arguments[2])
        _decay_and_add(builder, rows, operands, arguments[6], arguments[7], lambda index: None)
        return context.get_dummy_value()

    return types.void(state, first, width, table, decay, k, u, count), codegen


@intrinsic
def table_decay_and_add_fetching(
    typing_context: Any,
    state: Any,
    first: Any,
    width: Any,
    table: Any,
    decay: Any,
    k: Any,
    u: Any,
    count: Any,
    ahead: Any,
    ahead_row: Any,
) -> Any:
    """The same, asking on the way for ROWS rows of the matrix `ahead` [n, width] from `ahead_row` on.

    Two lines a step: asked for all at once they would fill the queue of misses and hold the arithmetic up,
    which is why a decode step with them in one burst was slower than without.
    """
    need_fp32(state=state, table=table)
    need_matrix(ahead)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        wide = arguments[2]
        operands = _from_table(context, builder, signature.args[3], arguments[3:6], wide)
        kinds = [signature.args[0], signature.args[8]]
        pointer, target = pointers_of(context, builder, kinds, [arguments[0], arguments[8]])
        rows = _row_starts(builder, pointer, arguments[1], wide)
        begin = builder.mul(arguments[9], wide)

        def fetch(index: Any) -> None:
            # ROWS rows lie side by side: ROWS numbers of them for each one of a row.
            place: Any = builder.add(begin, builder.mul(index, ir.Constant(index.type, ROWS)))
            for line in range(0, ROWS * LANES, _LINE):
                prefetch_line(builder, target, builder.add(place, ir.Constant(place.type, line)))

        _decay_and_add(builder, rows, operands, arguments[6], arguments[7], fetch)
        return context.get_dummy_value()

    return types.void(state, first, width, table, decay, k, u, count, ahead, ahead_row), codegen


@intrinsic
def add_rows(
    typing_context: Any, target: Any, rows: Any, first: Any, width: Any, factors: Any, count: Any
) -> Any:
    """target <- ((target + f0 row0) + f1 row1) + ... over the first `count` numbers (a multiple of LANES).

    target [>= count], rows [n, width], contiguous fp32; rows first .. first + ROWS - 1; factors a tuple.
    """
    need_fp32(target=target, rows=rows)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        into, matrix, start, wide, scalars, end = arguments
        pointers = pointers_of(context, builder, signature.args[:2], [into, matrix])
        starts = _row_starts(builder, pointers[1], start, wide)
        factor_lanes = [spread(builder, builder.extract_value(scalars, r)) for r in range(ROWS)]

        def step(index: Any, values: list[Any]) -> list[Any]:
            total = load_lanes(builder, pointers[0], index)
            for row, factor in zip(starts, factor_lanes, strict=True):
                total = fused(builder, factor, load_lanes(builder, row, index), total)
            store_lanes(builder, total, pointers[0], index)
            return values

        over(builder, end, LANES, [], step)
        return context.get_dummy_value()

    return types.void(target, rows, first, width, factors, count), codegen
