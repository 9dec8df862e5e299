"""Runs the cases of `inside/`, each strategy in a process of its own (SGLang keeps one configuration a
process)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INSIDE = Path(__file__).parent / "inside"


@pytest.mark.parametrize(
    "settings",
    [
        {"K3_STRATEGY": "extra_buffer"},
        pytest.param({"K3_STRATEGY": "extra_buffer", "K3_GRID": "64"}, marks=pytest.mark.verify),
        pytest.param({"K3_STRATEGY": "extra_buffer", "K3_DRAFT": "1"}, marks=pytest.mark.verify),
        pytest.param({"K3_STRATEGY": "lazy"}, marks=pytest.mark.verify),
        pytest.param({"K3_STRATEGY": "lazy", "K3_DRAFT": "1"}, marks=pytest.mark.verify),
        pytest.param({"K3_STRATEGY": "no_buffer"}, marks=pytest.mark.verify),
    ],
    ids=lambda settings: ", ".join(settings.values()),
)
def test_cases_inside_the_scheduler(settings: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-o", "python_files=cases_*.py", str(INSIDE)]
    run = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
