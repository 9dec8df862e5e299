"""Sentences that the Markdown reports share."""

from __future__ import annotations

from benchmarks.schema import Machine


def machine_line(machine: Machine) -> str:
    """One line that names machine, software and date."""
    return (
        f"{machine.cpu}, {machine.cores} cores, {machine.threads} threads, "
        f"torch {machine.versions['torch']}, SGLang {machine.versions['sglang']}, "
        f"commit {machine.commit}, {machine.date}."
    )
