"""Runs the cases_*.py of this folder in processes where Triton interprets: it decides so when imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inside import run_cases

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("cases", sorted(FOLDER.glob("cases_*.py")), ids=lambda path: path.stem)
def test_cases_in_the_interpreter(cases: Path):
    run_cases(cases, {"TRITON_INTERPRET": "1"})
