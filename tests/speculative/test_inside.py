"""Runs the cases of `inside/` under the real scheduler, each strategy and form of the records in a process of
its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_k3.speculative.record_forms import DEFAULT, FORMS, VARIABLE
from tests.inside import run_cases

INSIDE = Path(__file__).parent / "inside"
CHOSEN = {"extra_buffer": "", "no_buffer": "not boundary", "lazy": ""}


def settings(strategy: str, form: str) -> dict[str, str]:
    return {"K3_STRATEGY": strategy, VARIABLE: form}


def test_cases_inside_the_scheduler() -> None:
    run_cases(INSIDE, settings("extra_buffer", DEFAULT))


def test_records_of_another_form() -> None:
    """What a form changes: states after runs of all lengths, boundaries, rows that are used again."""
    run_cases(INSIDE, settings("lazy", "ring"), names="forced or boundary or aborted or machine")


@pytest.mark.verify
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", CHOSEN)
def test_all_cases_of_each_strategy_and_form(strategy: str, form: str) -> None:
    run_cases(INSIDE, settings(strategy, form), names=CHOSEN[strategy])
