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
    "strategy, chosen",
    [
        ("extra_buffer", ""),
        pytest.param("no_buffer", "not boundary", marks=pytest.mark.verify),
        pytest.param("lazy", "", marks=pytest.mark.verify),
    ],
)
def test_cases_inside_the_scheduler(strategy, chosen):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-o",
        "python_files=cases_*.py",
        str(INSIDE),
        "-k",
        chosen,
    ]
    run = subprocess.run(
        command, env=os.environ | {"K3_STRATEGY": strategy}, capture_output=True, text=True, timeout=1800
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
