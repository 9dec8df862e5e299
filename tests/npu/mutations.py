"""Changed calls of vendors' operators: an argument removed, two swapped, or a shape changed.

A call site is a line of the package that calls an operator of torch_npu or of another vendor's package. Its
call goes through here, so the change is made to what the line itself passes.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

import sglang_k3

PACKAGE = Path(sglang_k3.__file__).parent
_FINDERS = ("operators", "package_operator", "package_function")
"""Names in our modules by which they come to a vendor's operators."""

Arguments = tuple[list[Any], dict[str, Any]]
Change = Callable[[list[Any], dict[str, Any]], Arguments]


@dataclass(frozen=True)
class Line:
    """file, from the package on; number; operator."""

    file: str
    number: int
    operator: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} {self.operator}"


@dataclass
class Called:
    """defaults: of the operator's parameters."""

    args: list[Any]
    kwargs: dict[str, Any]
    parameters: list[str]
    defaults: dict[str, Any]


class _Call:
    """An operator, called through `Interposed`."""

    def __init__(self, owner: Interposed, operator: Any, name: str) -> None:
        self._owner, self._operator, self._name = owner, operator, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        file = Path(frame.f_code.co_filename).relative_to(PACKAGE)
        line = Line(str(file), frame.f_lineno, self._name)
        given = self._owner.heard(line, self._operator, list(args), kwargs)
        return self._operator(*given[0], **given[1])


class _Operators:
    def __init__(self, owner: Interposed) -> None:
        self._owner = owner

    def __getattr__(self, name: str) -> _Call:
        return _Call(self._owner, getattr(torch.ops.npu, name), name)


class Interposed:
    """Notes each line's calls; while `change` is set, passes them the arguments that it makes of theirs."""

    def __init__(self) -> None:
        self.calls: dict[Line, Called] = {}
        self.changed: Line | None = None
        self.change: Change | None = None

    def heard(self, line: Line, operator: Any, args: list[Any], kwargs: dict[str, Any]) -> Arguments:
        self.calls.setdefault(line, Called(args, kwargs, *_parameters(operator)))
        if self.change is not None and line == self.changed:
            return self.change(args, kwargs)
        return args, kwargs

    @contextmanager
    def installed(self) -> Iterator[Interposed]:
        kept: list[tuple[Any, str, Any]] = []
        for module in [m for name, m in sys.modules.items() if name.startswith("sglang_k3.kernels.")]:
            for name in _FINDERS:
                if (found := vars(module).get(name)) is not None:
                    kept.append((module, name, found))
                    setattr(module, name, self._finder(name, found))
        try:
            yield self
        finally:
            for module, name, found in kept:
                setattr(module, name, found)

    def _finder(self, name: str, found: Callable[..., Any]) -> Callable[..., Any]:
        if name == "operators":
            return lambda: _Operators(self)

        def ask(*given: Any) -> Any:
            operator = found(*given)
            return None if operator is None else _Call(self, operator, given[-1])

        return ask


def _parameters(operator: Any) -> tuple[list[str], dict[str, Any]]:
    """Names in order, and defaults, of a torch operator or of a Python function."""
    if isinstance(operator, torch._ops.OpOverloadPacket):
        arguments = operator.default._schema.arguments
        return [a.name for a in arguments], {
            a.name: a.default_value for a in arguments if a.has_default_value()
        }
    parameters = inspect.signature(operator).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    return list(parameters), defaults


def import_kernels() -> None:
    """Every module of ours that could hold a call."""
    for file in PACKAGE.glob("kernels/*/ascend*.py"):
        importlib.import_module("sglang_k3." + ".".join(file.relative_to(PACKAGE).with_suffix("").parts))


# --- changes -----------------------------------------------------------------------------------------------


def _tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None


def _same(value: Any, default: Any) -> bool:
    return not isinstance(value, torch.Tensor | list) and value == default


def changes(called: Called) -> Iterator[tuple[str, Change]]:
    """Each change of a call, by a name. Left out: what makes the same call again."""
    places = {called.parameters[n]: n for n in range(len(called.args))}
    keys: list[str] = [*places, *called.kwargs]

    def value_of(key: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return args[places[key]] if key in places else kwargs[key]

    def with_values(new: dict[str, Callable[[list[Any], dict[str, Any]], Any]]) -> Change:
        def change(args: list[Any], kwargs: dict[str, Any]) -> Arguments:
            made = {key: make(args, kwargs) for key, make in new.items()}
            args, kwargs = list(args), dict(kwargs)
            for key, value in made.items():
                if key in places:
                    args[places[key]] = value
                else:
                    kwargs[key] = value
            return args, kwargs

        return change

    def removed(key: str) -> Change:
        def change(args: list[Any], kwargs: dict[str, Any]) -> Arguments:
            if key in places:
                return args[: places[key]] + args[places[key] + 1 :], kwargs
            return args, {name: value for name, value in kwargs.items() if name != key}

        return change

    for key in keys:
        value = value_of(key, called.args, called.kwargs)
        if key not in called.defaults or not _same(value, called.defaults[key]):
            yield f"without {key}", removed(key)
    tensors = [key for key in keys if _tensor(value_of(key, called.args, called.kwargs)) is not None]
    for first, second in combinations(tensors, 2):
        if value_of(first, called.args, called.kwargs) is not value_of(second, called.args, called.kwargs):
            swap = {
                first: lambda args, kwargs, key=second: value_of(key, args, kwargs),
                second: lambda args, kwargs, key=first: value_of(key, args, kwargs),
            }
            yield f"{first} and {second} swapped", with_values(swap)
    for key in keys:
        value = value_of(key, called.args, called.kwargs)
        if (tensor := _tensor(value)) is not None:
            for axis in range(tensor.dim()):

                def shorter(args: list[Any], kwargs: dict[str, Any], key: str = key, axis: int = axis) -> Any:
                    whole = value_of(key, args, kwargs)
                    given = _tensor(whole)
                    assert given is not None
                    part = given.narrow(axis, 0, given.shape[axis] - 1)
                    return [part] if isinstance(whole, list) else part

                yield f"{key} one shorter along axis {axis}", with_values({key: shorter})
        elif isinstance(value, list) and value:
            yield (
                f"{key} one shorter",
                with_values({key: lambda args, kwargs, key=key: value_of(key, args, kwargs)[:-1]}),
            )
