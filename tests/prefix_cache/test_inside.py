"""Runs the cases of `inside/` under the real scheduler, each strategy in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inside import run_cases

INSIDE = Path(__file__).parent / "inside"


FULL = {
    "extra_buffer": {"K3_STRATEGY": "extra_buffer", "K3_SCHEDULES": "100000"},
    "grid of 64": {"K3_STRATEGY": "extra_buffer", "K3_GRID": "64"},
    "speculating": {"K3_STRATEGY": "extra_buffer", "K3_DRAFT": "1"},
    "lazy": {"K3_STRATEGY": "lazy"},
    "lazy, speculating": {"K3_STRATEGY": "lazy", "K3_DRAFT": "1"},
    "one request": {"K3_STRATEGY": "one request"},
    "one state a path": {"K3_STRATEGY": "one state a path"},
    "no_buffer": {"K3_STRATEGY": "no_buffer"},
    "no_buffer, speculating": {"K3_STRATEGY": "no_buffer", "K3_DRAFT": "1"},
}


# What says how deep a hit is holds where the pool has room for it.
WITHOUT_ROOM = "fuzz or broken or fail_once or longer_than"


def test_cases_inside_the_scheduler() -> None:
    run_cases(INSIDE, {"K3_STRATEGY": "extra_buffer"})


@pytest.mark.verify
@pytest.mark.parametrize("name", FULL)
def test_all_cases_of_each_strategy(name: str) -> None:
    run_cases(INSIDE, FULL[name], "verify or not verify", WITHOUT_ROOM if name.startswith("one ") else "")
