"""Runs the cases of `inside/`, each strategy in a process of its own (SGLang keeps one configuration a
process)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def run(settings: dict[str, str], chosen: str, names: str = "") -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-o", "python_files=cases_*.py"]
    command += ["-m", chosen, "-k", names, str(INSIDE)]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_cases_inside_the_scheduler() -> None:
    run({"K3_STRATEGY": "extra_buffer"}, "not verify")


@pytest.mark.verify
@pytest.mark.parametrize("name", FULL)
def test_all_cases_of_each_strategy(name: str) -> None:
    run(FULL[name], "verify or not verify", WITHOUT_ROOM if name.startswith("one ") else "")
