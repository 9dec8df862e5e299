"""Runs the cases_*.py of this folder in processes where Triton interprets: it decides so when imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inside import run_cases

FOLDER = Path(__file__).parent


LONG = ("cases_launches",)
"""Launches at the largest sizes: a minute."""


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.verify if path.stem in LONG else ())
        for path in sorted(FOLDER.glob("cases_*.py"))
    ],
)
def test_cases_in_the_interpreter(cases: Path):
    run_cases(cases, {"TRITON_INTERPRET": "1"})
