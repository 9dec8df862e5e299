"""Slow-downs on purpose, and a clock that makes a measurement's times known beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

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
