"""Forms that triton-ascend refuses or miscompiles, found in the source: the interpreter accepts them all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

KERNELS = Path(__file__).parents[3] / "sglang_k3" / "kernels"


def kernel_files() -> list[Path]:
    return sorted(KERNELS.glob("*/triton*.py"))


def findings(source: str) -> list[str]:
    """ "LINE: KERNEL has WHAT" for each forbidden form in the functions that @triton.jit decorates."""
    return [
        f"{line}: {function.name} has {what}"
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef) and any(map(_is_jit, function.decorator_list))
        for line, what in _forbidden(function)
    ]


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) in ("triton.jit", "jit")


def _forbidden(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    constants = _constants(function)
    for node in ast.walk(function):
        if isinstance(node, ast.While):
            yield node.lineno, "a while loop"
        elif isinstance(node, ast.Break | ast.Continue):
            yield node.lineno, f"a {type(node).__name__.lower()}"
        elif isinstance(node, ast.Lambda):
            yield node.lineno, "a lambda"
        elif isinstance(node, ast.Return) and node is not function.body[-1]:
            yield node.lineno, "an early return"
        elif isinstance(node, ast.Subscript) and not _is_broadcast(node.slice):
            yield node.lineno, f"an indexed tensor, {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("range", "tl.range"):
            if len({_is_constant(bound, constants) for bound in node.args} - {None}) > 1:
                yield node.lineno, f"a range of run-time and constexpr bounds, {ast.unparse(node)}"
        elif isinstance(node, ast.For) and ast.unparse(node.iter).split("(")[0] not in (
            "range",
            "tl.range",
            "tl.static_range",
        ):
            yield node.lineno, f"a loop over {ast.unparse(node.iter)}"


def _constants(function: ast.FunctionDef) -> set[str]:
    """Names declared tl.constexpr, as arguments or in the body."""
    declared = [(a.arg, a.annotation) for a in function.args.args if a.annotation]
    declared += [
        (node.target.id, node.annotation)
        for node in ast.walk(function)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    return {name for name, annotation in declared if ast.unparse(annotation).endswith("constexpr")}


def _is_constant(bound: ast.expr, constants: set[str]) -> bool | None:
    """Whether a loop's bound is known to the compiler; None for a bare number, which goes with either."""
    names = {node.id for node in ast.walk(bound) if isinstance(node, ast.Name)} - {"tl", "triton"}
    if not names and not any(isinstance(node, ast.Call) for node in ast.walk(bound)):
        return None
    return bool(names) and names <= constants


def _is_broadcast(index: ast.expr) -> bool:
    """Whether [index] adds axes and takes no element."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return all(
        (isinstance(part, ast.Constant) and part.value is None)
        or (isinstance(part, ast.Slice) and not (part.lower or part.upper or part.step))
        for part in parts
    )
