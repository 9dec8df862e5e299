"""Our Triton kernels, asked before all others and run by Triton's interpreter. Imported first of all: Triton
looks at the variable when it is imported."""

from __future__ import annotations

import os
from typing import Any

from sglang_k3.kernels import order

VARIABLES = {"TRITON_INTERPRET": "1", order.VARIABLE: order.TRITON}
os.environ.update(VARIABLES)

PAGES = ("--page-size", "64")
"""Attention reads 64 neighbouring slots."""
REQUESTS = 3


def serve(emulator: Any, model: str, *flags: str) -> Any:
    """The scheduler on the emulated NPU with these kernels."""
    from sglang_k3.kernels import registry
    from sglang_k3.testing.loop import Loop
    from tests.npu.workload import FLAGS

    _fill_gaps()
    registry.load()
    emulator.interpret("sglang_k3")
    return Loop("--model-path", model, *FLAGS, *PAGES, *flags, device="npu")


def _fill_gaps() -> None:
    """What triton-ascend 3.2.0's interpreter lacks of the language that its compiler takes."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    setattr(InterpreterBuilder, "get_int1_ty", lambda self: tl.int1)  # noqa: B010


def chosen() -> dict[str, set[str]]:
    """What was chosen on the NPU so far: names by operator."""
    from tests.npu import table

    names: dict[str, set[str]] = {}
    for operator, name in table.chosen():
        names.setdefault(operator, set()).add(name)
    return names


def quiet_step(loop: Any, emulator: Any, model: str) -> None:
    """A step of one running request asks the host for nothing undeclared."""
    from tests.npu.declared import report, undeclared
    from tests.npu.workload import prompts

    request = loop.admit("quiet", prompts(model)[0], 8)
    loop.step(4)
    assert not request.finished()
    with emulator.logging() as log:
        loop.step()
    assert log.launches > 100
    assert undeclared(log) == [], report(log)
    loop.finish(request)
