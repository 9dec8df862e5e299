"""Runs the cases of `inside/` under the real scheduler, each strategy in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inside import run_cases

INSIDE = Path(__file__).parent / "inside"


@pytest.mark.parametrize(
    "strategy, chosen",
    [
        ("extra_buffer", ""),
        pytest.param("no_buffer", "not boundary", marks=pytest.mark.verify),
        pytest.param("lazy", "", marks=pytest.mark.verify),
    ],
)
def test_cases_inside_the_scheduler(strategy: str, chosen: str) -> None:
    run_cases(INSIDE, {"K3_STRATEGY": strategy}, names=chosen)
