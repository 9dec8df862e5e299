"""Runs the cases of an `inside/` folder, each kind in a process of its own, since SGLang keeps one
configuration a process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

_BUFFERED = ("--page-size", "16", "--mamba-track-interval", "64")
STRATEGIES = {
    "extra_buffer": _BUFFERED,
    "lazy": (*_BUFFERED, "--mamba-radix-cache-strategy", "extra_buffer_lazy"),
    "no_buffer": (
        *("--page-size", "1", "--mamba-radix-cache-strategy", "no_buffer"),
        "--disable-overlap-schedule",
    ),
}
"""launch_server's flags of the prefix cache's strategies."""


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A prompt of so many tokens; a longer one of the same seed goes on where it ends."""
    draw = random.Random(seed)
    return [draw.randrange(1500) for _ in range(length)]


def run_cases(folder: Path, settings: dict[str, str], marks: str = "not verify", names: str = "") -> None:
    """settings: environment variables that the folder's conftest reads. marks, names: pytest's -m and -k.

    Raises AssertionError with pytest's output where a case fails, or none ran.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-o", "python_files=cases_*.py"]
    command += ["-m", marks, "-k", names, str(folder)]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
