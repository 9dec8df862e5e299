"""The regression gate of the ablation: does a stage gain less over the first one than it did?

    python -m benchmarks.compare_ablation OLD.json NEW.json [--tolerance 0.15]

Compared is each stage's duration by that of the first stage of its own run, since machines drift. A stage has
become slower where its ratio of medians grew by more than the tolerance and no repeat of the new file is as
good as the worst of the old one. Exit code 0: none has; 1: those it names have; 2: the files can't be
compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.ablation import Report
from benchmarks.compare import INCOMPARABLE, SLOWER, parse, read

_SAME_MACHINE = ("cpu", "cores", "threads", "torch_capability")


@dataclass(frozen=True)
class Share:
    """A stage's duration by the first stage's: of the medians, and of each repeat."""

    median: float
    repeats: list[float]

    @staticmethod
    def of(report: Report, stage: str, load: tuple[str, int]) -> Share:
        seconds, first = (report.seconds(each, *load) for each in (stage, report.stages[0]))
        repeats = [a / b for a, b in zip(seconds, first, strict=True)]
        return Share(statistics.median(seconds) / statistics.median(first), repeats)


@dataclass(frozen=True)
class Line:
    """One stage under one load, old and new."""

    stage: str
    load: tuple[str, int]
    old: Share
    new: Share

    @property
    def slowdown(self) -> float:
        """0.2: takes 1.2 times as much of the first stage's time."""
        return self.new.median / self.old.median - 1

    def slower(self, tolerance: float) -> bool:
        return self.slowdown > tolerance and min(self.new.repeats) > max(self.old.repeats)

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
    """Every stage behind the first, of two reports without obstacles."""
    for load in sorted(loads(old)):
        for stage in old.stages[1:]:
            yield Line(stage, load, Share.of(old, stage, load), Share.of(new, stage, load))


def main(arguments: Sequence[str] | None = None) -> int:
    console = Console(soft_wrap=True)
    options = parse("compare_ablation", __doc__, 0.15, arguments)
    try:
        old, new = (read(path, Report, "this ablation") for path in (options.old, options.new))
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


def _table(compared: Sequence[Line], tolerance: float) -> Table:
    table = Table()
    table.add_column("stage", no_wrap=True)
    table.add_column("load")
    for column in ("old, of the first", "new, of the first", "slower by"):
        table.add_column(column, justify="right")
    for line in compared:
        style = "red" if line.slower(tolerance) else None
        cells = f"{line.old.median:.3f}", f"{line.new.median:.3f}", f"{line.slowdown:+.1%}"
        table.add_row(line.stage, f"{line.load[0]}, {line.load[1]}", *cells, style=style)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
