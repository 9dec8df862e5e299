"""Runs kernels in Triton's interpreter and keeps what the hardware would object to, or be slowed by.

with recording() as launches:
    operator(...)
launches[0].grid, launches[0].loaded, ...

Every launch is held to the rules of an Ascend device while it runs: at most MAX_PROGRAMS programs and at most
one a core, no 32-bit integer that overflows, no access outside the tensors it was given. Bytes are those that
the kernel asks for; what a cache would serve counts each time.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from sglang_k3.kernels.triton_targets import MAX_PROGRAMS, target

_BITS_32 = range(-(2**31), 2**31)
_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64"}
_TYPES |= {torch.int32: "i32", torch.bool: "i1", torch.uint8: "u8", torch.int8: "i8"}


class Objection(AssertionError):
    """A launch that an Ascend device would not run, or not as written."""


@dataclass
class Launch:
    """One launch. types: of the run-time arguments as Triton names them; constants: the constexprs.
    loaded, stored: bytes by the data type of what was moved."""

    module: str
    kernel: str
    grid: tuple[int, ...]
    types: dict[str, str]
    constants: dict[str, Any]
    loaded: Counter[str] = field(default_factory=Counter)
    stored: Counter[str] = field(default_factory=Counter)

    @property
    def bytes(self) -> int:
        return self.loaded.total() + self.stored.total()


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if value in _BITS_32 else "i64"


class _Memory:
    """The tensors of a launch, as ranges of addresses."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        spans = sorted(
            (s.data_ptr(), s.data_ptr() + s.nbytes()) for s in (x.untyped_storage() for x in tensors)
        )
        self.begins, self.ends = (np.array(part, dtype=np.uint64) for part in zip(*spans, strict=True))

    def check(self, pointers: Any, mask: Any, what: str) -> int:
        """Bytes that the access moves. Raises Objection for one outside every tensor."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))
        # A mask may arrive as integers, which would index.
        wanted = addresses[np.broadcast_to(mask.data.astype(bool), addresses.shape)]
        if not wanted.size:
            return 0
        for address in (wanted.min(), wanted.max()):
            place = np.searchsorted(self.begins, address, side="right") - 1
            if place < 0 or address + np.uint64(size) > self.ends[place]:
                raise Objection(f"{what} outside the tensors of the launch")
        return wanted.size * size


def check_grid(grid: tuple[int, ...], cores: int) -> None:
    """Raises Objection for a grid that CANN refuses, or that is no walk over items."""
    programs = int(np.prod(grid))
    if programs > MAX_PROGRAMS:
        raise Objection(f"a grid of {programs:,} programs; CANN starts at most {MAX_PROGRAMS:,}")
    if programs > cores:
        raise Objection(f"a grid of {programs:,} programs on {cores} cores: let each walk over its items")


@contextmanager
def recording(
    *, cores: int | None = None, last_only: bool = False, dry: bool = False
) -> Iterator[list[Launch]]:
    """The launches inside, in order. cores: that a grid may have (the target's vector cores if left out).
    last_only: of a grid, run the program with the last item alone, which reaches furthest. dry: run none."""
    limit = target().vector_cores if cores is None else cores
    builder: Any = interpreter.interpreter_builder
    executor_class: Any = interpreter.GridExecutor
    launches: list[Launch] = []

    def run(executor: Any, *given: Any, **named: Any) -> None:
        function = executor.fn
        named = {name: value for name, value in named.items() if name in executor.arg_names}
        arguments = inspect.getcallargs(function, *given, **named)
        grid = executor.grid if isinstance(executor.grid, tuple) else tuple(executor.grid)
        check_grid(grid, limit)
        constants = {name: arguments[name] for name in executor.constexprs}
        runtime = {name: value for name, value in arguments.items() if name not in constants}
        launch = Launch(
            function.__module__,
            function.__name__,
            grid,
            {name: _type(value) for name, value in runtime.items()},
            constants,
        )
        launches.append(launch)
        if dry:
            return
        memory = _Memory([value for value in runtime.values() if isinstance(value, torch.Tensor)])
        load, store = builder.create_masked_load, builder.create_masked_store

        def counted_load(pointers: Any, mask: Any, *rest: Any) -> Any:
            moved = memory.check(pointers, mask, "a load")
            launch.loaded[str(pointers.get_element_ty())] += moved
            return load(pointers, mask, *rest)

        def counted_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            moved = memory.check(pointers, mask, "a store")
            launch.stored[str(pointers.get_element_ty())] += moved
            return store(pointers, value, mask, *rest)

        builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
        scope = interpreter._patch_lang(function)
        try:
            inside = {
                name: value if name in constants else interpreter._implicit_cvt(value)
                for name, value in arguments.items()
            }
            builder.set_grid_dim(*grid, *(1,) * (3 - len(grid)))
            items = runtime.get("items")
            last = (int(items) - 1) % grid[0] if last_only and items else None
            for program in np.ndindex(*grid):
                if last is None or program[0] == last:
                    builder.set_grid_idx(*program, *(0,) * (3 - len(grid)))
                    function(**inside)
        except interpreter.InterpreterError as error:
            raise _unwrapped(error) from error
        except AssertionError as error:
            raise Objection(str(error)) from error
        finally:
            scope.restore()
            del builder.create_masked_load, builder.create_masked_store

    original, options = executor_class.__call__, builder.options
    executor_class.__call__ = functools.wraps(original)(run)
    # With debug the interpreter asserts that no 32-bit sum or product overflows.
    builder.options = dataclasses.replace(options, debug=True)
    try:
        yield launches
    finally:
        executor_class.__call__, builder.options = original, options


def _unwrapped(error: BaseException) -> BaseException:
    """The exception that a nested device function's error stands for."""
    while isinstance(error, interpreter.InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return Objection(str(error)) if isinstance(error, AssertionError) else error
