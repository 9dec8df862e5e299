"""Runs the cases of `inside/` under the real scheduler, each strategy in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_k3.speculative.record_forms import VARIABLE
from tests.inside import run_cases

INSIDE = Path(__file__).parent / "inside"


FULL = {
    "extra_buffer": {"K3_STRATEGY": "extra_buffer", "K3_SCHEDULES": "100000"},
    "grid of 64": {"K3_STRATEGY": "extra_buffer", "K3_GRID": "64"},
    "speculating": {"K3_STRATEGY": "extra_buffer", "K3_DRAFT": "1"},
    "speculating, plain records": {"K3_STRATEGY": "extra_buffer", "K3_DRAFT": "1", VARIABLE: "plain"},
    "speculating, a ring of records": {"K3_STRATEGY": "extra_buffer", "K3_DRAFT": "1", VARIABLE: "ring"},
    "eviction by value": {"K3_STRATEGY": "extra_buffer", "K3_EVICTION": "value"},
    "lazy": {"K3_STRATEGY": "lazy"},
    "lazy, speculating": {"K3_STRATEGY": "lazy", "K3_DRAFT": "1"},
    "anchored records": {"K3_STRATEGY": "lazy", "K3_DRAFT": "1", VARIABLE: "anchored"},
    "mixed": {"K3_STRATEGY": "mixed"},
    "page 64": {"K3_STRATEGY": "page 64"},
    "one request": {"K3_STRATEGY": "one request"},
    "one state a path": {"K3_STRATEGY": "one state a path"},
    "no_buffer": {"K3_STRATEGY": "no_buffer"},
    "events, speculating": {"K3_STRATEGY": "events", "K3_DRAFT": "1"},
    "no_buffer, speculating": {"K3_STRATEGY": "no_buffer", "K3_DRAFT": "1"},
    "no_buffer, a ring of records": {"K3_STRATEGY": "no_buffer", "K3_DRAFT": "1", VARIABLE: "ring"},
}


# What says how deep a hit is holds for pages of 16, whole chunks, and pools with room for a prompt's states.
OTHERWISE = "fuzz or alone or fail_once or longer_than"
OTHER = ("mixed", "page 64", "one request", "one state a path")


def test_cases_inside_the_scheduler() -> None:
    run_cases(INSIDE, {"K3_STRATEGY": "extra_buffer"})


def test_eviction_by_value() -> None:
    run_cases(INSIDE, FULL["eviction by value"], names="cases_eviction or fork or alone")


@pytest.mark.parametrize("strategy", ["events", "joint events"])
def test_state_events_of_the_scheduler(strategy: str) -> None:
    run_cases(INSIDE, {"K3_STRATEGY": strategy}, names="cases_events")


@pytest.mark.verify
@pytest.mark.parametrize("name", FULL)
def test_all_cases_of_each_strategy(name: str) -> None:
    run_cases(INSIDE, FULL[name], "verify or not verify", OTHERWISE if name in OTHER else "")
