"""One quick run on a ticking clock, shared by the tests that read a report."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import runner
from benchmarks.cases import Sizes, all_cases
from benchmarks.kernels import QUICK
from benchmarks.schema import Report, Settings
from sglang_k3.kernels import registry
from tests.benchmarks.planted import TickingClock

SETTINGS = Settings(
    regime="quick",
    rounds=QUICK.rounds,
    cold_bytes=QUICK.cold_bytes,
    probe_samples=QUICK.probe_samples,
    probe_tolerance=QUICK.tolerance,
    attempts_allowed=QUICK.attempts,
    only=[],
)


def quick_report(clock: TickingClock, resolve: Callable = registry.resolve) -> Report:
    """Every case at small sizes, through the real kernels and probes; only the time is made up."""
    return runner.run(all_cases(Sizes.quick()), SETTINGS, QUICK, resolve=resolve, clock=clock)


@pytest.fixture(scope="session")
def report() -> Report:
    return quick_report(TickingClock())
