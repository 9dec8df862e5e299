"""Runs the cases of `inside/` under the real scheduler, each strategy and form of the records in a process of
its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_k3.speculative.record_forms import DEFAULT, FORMS, VARIABLE
from tests.inside import run_cases

INSIDE = Path(__file__).parent / "inside"
CHOSEN = {"extra_buffer": "", "no_buffer": "not boundary", "lazy": ""}
# Anchored states bring a way of their own to keep checkpoints.
PAIRS = [
    (strategy, name)
    for strategy in CHOSEN
    for name, form in FORMS.items()
    if strategy == "lazy" or not form.anchored
]


def settings(strategy: str, form: str) -> dict[str, str]:
    return {"K3_STRATEGY": strategy, VARIABLE: form}


def test_cases_inside_the_scheduler() -> None:
    run_cases(INSIDE, settings("extra_buffer", DEFAULT))


@pytest.mark.parametrize("form", ["ring", "anchored"])
def test_records_of_another_form(form: str) -> None:
    """What a form changes: states after runs of all lengths, boundaries, rows that are used again."""
    names = "forced or boundary or aborted or machine or anchor or weights"
    run_cases(INSIDE, settings("lazy", form), names=names)


@pytest.mark.parametrize("instructions", ["yes", "no"])
def test_bf16_with_and_without_instructions_for_it(instructions: str) -> None:
    """Layers hand on bf16 or fp32; drafts, records and states fit together in both."""
    dtype = {"K3_DTYPE": "bfloat16", "K3_BF16_INSTRUCTIONS": instructions}
    run_cases(INSIDE, settings("extra_buffer", DEFAULT) | dtype, names="bf16")


@pytest.mark.verify
@pytest.mark.parametrize("strategy, form", PAIRS)
def test_all_cases_of_each_strategy_and_form(strategy: str, form: str) -> None:
    run_cases(INSIDE, settings(strategy, form), names=CHOSEN[strategy])
