"""The regression gate of the ablation: does a stage gain less over the first one than it did?

    python -m benchmarks.compare_ablation OLD.json NEW.json [--tolerance 0.15]

Compared is each stage's duration by that of the first stage of its own run, since machines drift. A stage has
become slower where its ratio of medians grew by more than the tolerance and no repeat of the new file is as
good as the worst of the old one. Exit code 0: none has; 1: those it names have; 2: the files can't be
compared.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.ablation import Report
from benchmarks.compare import INCOMPARABLE, SLOWER

_SAME_MACHINE = ("cpu", "cores", "threads", "torch_capability")


@dataclass(frozen=True)
class Line:
    """One stage under one load: its duration by the first stage's, of the medians and of each repeat."""

    stage: str
    load: tuple[str, int]
    old: float
    new: float
    old_repeats: tuple[float, ...]
    new_repeats: tuple[float, ...]

    @property
    def slowdown(self) -> float:
        """0.2: takes 1.2 times as much of the first stage's time."""
        return self.new / self.old - 1

    def slower(self, tolerance: float) -> bool:
        return self.slowdown > tolerance and min(self.new_repeats) > max(self.old_repeats)

    @property
    def name(self) -> str:
        workload, concurrency = self.load
        return f"{self.stage} ({workload}, {concurrency} at once)"


def loads(report: Report) -> set[tuple[str, int]]:
    return {(f.workload, f.concurrency) for run in report.runs for f in run.figures}


def obstacles(old: Report, new: Report) -> list[str]:
    """Why the two can't be compared; empty if they can. A stage that only the new file has is none."""
    found = [
        f"another {what}: {getattr(old.machine, what)!r}, then {getattr(new.machine, what)!r}"
        for what in _SAME_MACHINE
        if getattr(old.machine, what) != getattr(new.machine, what)
    ]
    if old.model != new.model:
        found.append(f"another model: {old.model}, then {new.model}")
    if old.stages[0] != new.stages[0]:
        found.append(f"another first stage: {old.stages[0]!r}, then {new.stages[0]!r}")
    found += [f"the new file lacks {stage!r}" for stage in old.stages if stage not in new.stages]
    found += [f"the new file lacks the load {load}" for load in sorted(loads(old) - loads(new))]
    return found


def lines(old: Report, new: Report) -> Iterator[Line]:
    """Every stage behind the first that both files have."""
    for load in sorted(loads(old) & loads(new)):
        for stage in old.stages[1:]:
            if stage in new.stages:
                yield Line(stage, load, *_medians(old, new, stage, load), *_repeats(old, new, stage, load))


def _medians(old: Report, new: Report, stage: str, load: tuple[str, int]) -> tuple[float, float]:
    before, after = (
        statistics.median(report.seconds(stage, *load))
        / statistics.median(report.seconds(report.stages[0], *load))
        for report in (old, new)
    )
    return before, after


def _repeats(
    old: Report, new: Report, stage: str, load: tuple[str, int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    before, after = (
        tuple(
            seconds / first
            for seconds, first in zip(
                report.seconds(stage, *load), report.seconds(report.stages[0], *load), strict=True
            )
        )
        for report in (old, new)
    )
    return before, after


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m benchmarks.compare_ablation", description=__doc__)
    made.add_argument("old", type=Path, metavar="OLD.json")
    made.add_argument("new", type=Path, metavar="NEW.json")
    made.add_argument("--tolerance", type=float, default=0.15, help="0.15: up to 15 %% slower passes")
    options = made.parse_args(arguments)
    console = Console(soft_wrap=True)
    try:
        old, new = _read(options.old), _read(options.new)
    except ValueError as error:
        console.print(f"can't compare: {error}", markup=False)
        return INCOMPARABLE
    blocking = obstacles(old, new)
    for reason in blocking:
        console.print(f"can't compare: {reason}", markup=False)
    if blocking:
        return INCOMPARABLE
    compared = list(lines(old, new))
    console.print(_table(compared, options.tolerance))
    slower = [line for line in compared if line.slower(options.tolerance)]
    for line in slower:
        console.print(f"slower by {line.slowdown:.1%}: {line.name}", markup=False)
    return SLOWER if slower else 0


def _read(path: Path) -> Report:
    """Raises ValueError for a file that does not exist or is no report of an ablation."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a report of this ablation: {error}") from error


def _table(compared: Sequence[Line], tolerance: float) -> Table:
    table = Table()
    for column in ("stage", "load"):
        table.add_column(column)
    for column in ("old, of the first", "new, of the first", "slower by"):
        table.add_column(column, justify="right")
    for line in compared:
        style = "red" if line.slower(tolerance) else None
        cells = f"{line.old:.3f}", f"{line.new:.3f}", f"{line.slowdown:+.1%}"
        table.add_row(line.stage, f"{line.load[0]}, {line.load[1]}", *cells, style=style)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
