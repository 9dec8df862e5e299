"""Vector instructions of the fast verify and commit: several tokens of a block meet a state at once.

Where row_vectors.py takes one token through ROWS rows of a state, these take TILE rows of it through a whole
block: each number of the state is loaded once for COLUMNS vectors, or for all tokens that enter it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from sglang_k3.kernels.row_math import LANES, fused, intrinsic
from sglang_k3.kernels.row_vectors import (
    load_lanes,
    need_fp32,
    need_matrix,
    over,
    pointers_of,
    prefetch_line,
    spread,
    store_lanes,
)

TILE = 8
"""Rows of a state worked on together: as many sums, a vector and a number fit 16 registers."""

COLUMNS = LANES
"""Vectors they meet at a time: one register."""

PADDING = 2 * LANES
"""A tile's width is a multiple of it: two registers of each row go together."""

_UNROLLED = 4
_LINE = 16
"""fp32 numbers of a cache line."""


def _columns_of(builder: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """Emit the transpose of TILE vectors of LANES numbers: three rounds that swap blocks of 1, 2 and 4."""
    for size in (1, 2, 4):
        turned = list(rows)
        low = [j if not j & size else LANES + j - size for j in range(LANES)]
        high = [j + size if not j & size else LANES + j for j in range(LANES)]
        for i in range(TILE):
            if not i & size:
                for target, mask in ((i, low), (i + size, high)):
                    lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), mask)
                    turned[target] = builder.shuffle_vector(rows[i], rows[i + size], lanes)
        rows = turned
    return rows


def _size(context: Any, builder: ir.IRBuilder, kind: Any, array: Any, axis: int) -> Any:
    return builder.extract_value(context.make_array(kind)(context, builder, array).shape, axis)


def _fetching(
    context: Any, builder: ir.IRBuilder, kind: Any, matrix: Any, row: Any, numbers: int
) -> Callable[[Any], None]:
    """Emit requests for TILE rows of a matrix, spread over a loop whose step takes `numbers` of each row:
    asked for all at once they would fill the queue of misses."""
    (pointer,) = pointers_of(context, builder, [kind], [matrix])
    begin = builder.mul(row, _size(context, builder, kind, matrix, 1))

    def fetch(index: Any) -> None:
        place: Any = builder.add(begin, builder.mul(index, ir.Constant(index.type, TILE)))
        for line in range(0, TILE * numbers, _LINE):
            prefetch_line(builder, pointer, builder.add(place, ir.Constant(place.type, line)))

    return fetch


_PANELS = 2
"""Registers' worth of vectors that a pass over half a tile meets: six loads for eight products."""


@intrinsic
def tile_products(
    typing_context: Any,
    tile: Any,
    vectors: Any,
    sums: Any,
    column: Any,
    first: Any,
    ahead: Any,
    ahead_row: Any,
) -> Any:
    """sums[column + j, first + r] = sum over c of tile[r, c] * vectors[column + j, c], j < 2 * COLUMNS.

    tile [TILE, width], width a multiple of 4; vectors [n, width] stored as [n / COLUMNS * width, COLUMNS]:
    COLUMNS numbers for one c lie side by side; sums [columns, rows]; all contiguous fp32. column: a multiple
    of 2 * COLUMNS. ahead, ahead_row: TILE rows of a matrix that will be wanted soon.
    """
    need_fp32(tile=tile, vectors=vectors, sums=sums)
    need_matrix(ahead)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        kinds, values = signature.args[:3], arguments[:3]
        source, table, target = pointers_of(context, builder, kinds, values)
        line, row, wanted = (arguments[i] for i in (3, 4, 6))

        def number(value: int) -> Any:
            return ir.Constant(row.type, value)

        width, height = (_size(context, builder, kinds[i], values[i], 1) for i in (0, 2))
        # Panel p begins behind p * width rows of COLUMNS numbers, and column = panel * COLUMNS.
        start = builder.gep(table, [builder.mul(line, width)])
        panel = builder.mul(width, number(COLUMNS))
        panels = [builder.gep(start, [builder.mul(panel, number(p))]) for p in range(_PANELS)]
        fetch = _fetching(context, builder, signature.args[5], arguments[5], wanted, _UNROLLED)
        zero = ir.Constant(ir.VectorType(ir.FloatType(), LANES), [0.0] * LANES)
        totals: list[list[Any]] = [[] for _ in range(_PANELS)]
        for half in range(0, TILE, TILE // _PANELS):
            rows = [
                builder.gep(source, [builder.mul(number(r), width)])
                for r in range(half, half + TILE // _PANELS)
            ]

            def step(index: Any, sums: list[Any], rows: list[Any] = rows, half: int = half) -> list[Any]:
                if half == 0:
                    fetch(index)
                for unrolled in range(_UNROLLED):
                    at = builder.add(index, number(unrolled))
                    place = builder.mul(at, number(COLUMNS))
                    operands = [load_lanes(builder, pointer, place) for pointer in panels]
                    each = [spread(builder, builder.load(builder.gep(pointer, [at]))) for pointer in rows]
                    sums = [
                        fused(builder, each[i // _PANELS], operands[i % _PANELS], total)
                        for i, total in enumerate(sums)
                    ]
                return sums

            done = over(builder, width, _UNROLLED, [zero] * TILE, step)
            for p in range(_PANELS):
                totals[p] += done[p::_PANELS]
        for p in range(_PANELS):
            for j, total in enumerate(_columns_of(builder, totals[p])):
                place = builder.add(line, number(p * COLUMNS + j))
                store_lanes(builder, total, target, builder.add(builder.mul(place, height), row))
        return context.get_dummy_value()

    return types.void(tile, vectors, sums, column, first, ahead, ahead_row), codegen


@intrinsic
def turn_rows(typing_context: Any, rows: Any, first: Any, vectors: Any, begin: Any) -> Any:
    """vectors[begin + c, j] = rows[first + j, c] for j < COLUMNS and every c.

    rows [n, width] (width a multiple of LANES), vectors [m, COLUMNS]: contiguous fp32.
    """
    need_fp32(rows=rows, vectors=vectors)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        kinds, values = ([of[i] for i in (0, 2)] for of in (signature.args, arguments))
        source, target = pointers_of(context, builder, kinds, values)
        first_row, begin_row = arguments[1], arguments[3]
        width = _size(context, builder, kinds[0], values[0], 1)

        def number(value: int) -> Any:
            return ir.Constant(first_row.type, value)

        starts = [
            builder.gep(source, [builder.mul(builder.add(first_row, number(j)), width)])
            for j in range(COLUMNS)
        ]
        into = builder.gep(target, [builder.mul(begin_row, number(COLUMNS))])

        def step(index: Any, nothing: list[Any]) -> list[Any]:
            turned = _columns_of(builder, [load_lanes(builder, start, index) for start in starts])
            for i, vector in enumerate(turned):
                place = builder.mul(builder.add(index, number(i)), number(COLUMNS))
                store_lanes(builder, vector, into, place)
            return nothing

        over(builder, width, LANES, [], step)
        return context.get_dummy_value()

    return types.void(rows, first, vectors, begin), codegen


@intrinsic
def rank_update(
    typing_context: Any,
    tile: Any,
    keys: Any,
    tokens: Any,
    factors: Any,
    begin: Any,
    first: Any,
    ahead: Any,
    ahead_row: Any,
) -> Any:
    """tile[r] <- tile[r] * keys[0] + the sum over i < tokens of factors[begin + i, first + r] * keys[1 + i],
    fused in the order of i.

    tile [TILE, width], width a multiple of PADDING; keys [n, width], factors [m, rows]; all contiguous fp32.
    ahead, ahead_row: TILE rows of a matrix that will be wanted soon.
    """
    need_fp32(tile=tile, keys=keys, factors=factors)
    need_matrix(ahead)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        picked = (0, 1, 3)
        kinds, values = ([of[i] for i in picked] for of in (signature.args, arguments))
        source, vectors, scalars = pointers_of(context, builder, kinds, values)
        count, begin_row, row, wanted = (arguments[i] for i in (2, 4, 5, 7))

        def number(value: int) -> Any:
            return ir.Constant(row.type, value)

        width, height = (_size(context, builder, kinds[i], values[i], 1) for i in (0, 2))
        key_start = builder.gep(vectors, [width])
        fetch = _fetching(context, builder, signature.args[6], arguments[6], wanted, PADDING)
        parts = range(0, PADDING, LANES)
        for half in range(0, TILE, TILE // len(parts)):
            numbers = range(half, half + TILE // len(parts))
            rows = [builder.gep(source, [builder.mul(number(r), width)]) for r in numbers]
            scalar_row = builder.add(builder.mul(begin_row, height), builder.add(row, number(half)))
            factor_start = builder.gep(scalars, [scalar_row])

            def step(
                index: Any,
                nothing: list[Any],
                rows: list[Any] = rows,
                factor_start: Any = factor_start,
                first_half: bool = half == 0,
            ) -> list[Any]:
                if first_half:
                    fetch(index)
                places = [builder.add(index, number(part)) for part in parts]
                d = [load_lanes(builder, vectors, place) for place in places]
                starts = [
                    builder.fmul(load_lanes(builder, pointer, place), decay)
                    for pointer in rows
                    for place, decay in zip(places, d, strict=True)
                ]

                def add(token: Any, totals: list[Any]) -> list[Any]:
                    at = builder.mul(token, width)
                    keys = [load_lanes(builder, key_start, builder.add(at, place)) for place in places]
                    own = builder.gep(factor_start, [builder.mul(token, height)])
                    each = [
                        spread(builder, builder.load(builder.gep(own, [number(r)]))) for r in range(len(rows))
                    ]
                    return [
                        fused(builder, each[i // len(keys)], keys[i % len(keys)], total)
                        for i, total in enumerate(totals)
                    ]

                totals = over(builder, count, 1, starts, add)
                for i, total in enumerate(totals):
                    store_lanes(builder, total, rows[i // len(places)], places[i % len(places)])
                return nothing

            over(builder, width, PADDING, [], step)
        return context.get_dummy_value()

    made = types.void(tile, keys, tokens, factors, begin, first, ahead, ahead_row)
    return made, codegen
