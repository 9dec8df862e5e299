"""Slow-downs on purpose, and a clock that makes a measurement's times known beforehand.

    python -m tests.benchmarks.planted kda.decode 0.2 --only kda.decode --out DIR

measures like `python -m benchmarks.kernels` with one operator slowed by a fifth, on the real clock: what
`benchmarks.compare` says of the result and of an honest one shows whether the gate would notice on a machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks import kernels
from sglang_k3.kernels import registry
from sglang_k3.kernels.registry import Call, Implementation


@dataclass
class TickingClock:
    """Each look at it is `step` seconds after the last, so whatever runs between two looks takes a step."""

    step: float = 1.0
    now: float = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def resolve_with(
    operator: str, change: Callable[[Callable], Callable]
) -> Callable[[str, Call], tuple[Implementation, object]]:
    """The registry's choice, with `change` applied to every implementation of one operator."""

    def resolve(name: str, call: Call) -> tuple[Implementation, object]:
        chosen, refused = registry.resolve(name, call)
        return (replace(chosen, function=change(chosen.function)) if name == operator else chosen), refused

    return resolve


def slower_by(share: float, clock: TickingClock) -> Callable[[Callable], Callable]:
    """On a ticking clock: the call takes `share` of a second more."""

    def change(function: Callable) -> Callable:
        def slow(*arguments):
            clock.now += share
            return function(*arguments)

        return slow

    return change


def busier_by(share: float) -> Callable[[Callable], Callable]:
    """On the real clock: after each call its thread spins for `share` of the time that the call took."""

    def change(function: Callable) -> Callable:
        def slow(*arguments):
            begin = time.perf_counter()
            result = function(*arguments)
            end = begin + (1 + share) * (time.perf_counter() - begin)
            while time.perf_counter() < end:
                pass
            return result

        return slow

    return change


def main(arguments: list[str]) -> int:
    """arguments: operator, share, then those of benchmarks.kernels."""
    operator, share, *others = arguments
    return kernels.main(others, resolve_with(operator, busier_by(float(share))))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
