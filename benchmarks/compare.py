"""The regression gate: did an operator get slower between two reports of one machine?

    python -m benchmarks.compare OLD.json NEW.json [--tolerance 0.1]

Compared is each operator's part of its limit (the probes of its own run), not its time: a shared machine
drifts by more than a regression. Exit code 0: nothing got slower by more than the tolerance; 1: the operators
it names did; 2: the files can't be compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.schema import VERSION, Entry, Report, load

SLOWER, INCOMPARABLE = 1, 2

_SAME_MACHINE = ("cpu", "cores", "l3_bytes", "threads", "torch_capability", "huge_pages")
_SAME_SETTINGS = ("regime", "rounds", "cold_bytes")


@dataclass(frozen=True)
class Line:
    """One case in one mode, old and new. `slowdown` 0.2: takes 1.2 times as much of the probe's time."""

    case: str
    mode: str
    old: Entry
    new: Entry

    @property
    def slowdown(self) -> float:
        return self.old.ratio / self.new.ratio - 1

    @property
    def name(self) -> str:
        return f"{self.case} ({self.mode}, {self.new.operator})"


def by_mode(report: Report) -> dict[tuple[str, str], Entry]:
    """(case, mode) -> entry: what served both modes in one file may serve one of them in the other."""
    return {(entry.case, mode): entry for entry in report.entries for mode in entry.modes}


def obstacles(old: Report, new: Report) -> list[str]:
    """Why the two can't be compared; empty if they can. An operator only the new file has is no obstacle."""
    found = [
        f"another {what}: {getattr(before, what)!r}, then {getattr(after, what)!r}"
        for before, after, fields in (
            (old.machine, new.machine, _SAME_MACHINE),
            (old.settings, new.settings, _SAME_SETTINGS),
        )
        for what in fields
        if getattr(before, what) != getattr(after, what)
    ]
    after = by_mode(new)
    for (case, mode), entry in by_mode(old).items():
        counterpart = after.get((case, mode))
        if counterpart is None:
            found.append(f"the new file lacks {case} ({mode}, {entry.operator})")
            continue
        if (entry.shape, entry.dtype) != (counterpart.shape, counterpart.dtype):
            found.append(f"{case} ({mode}) was measured at another shape")
        found += [
            f"{case} ({mode}) is marked invalid in the {age} file: its probes disagreed"
            for age, measured in (("old", entry), ("new", counterpart))
            if not measured.valid
        ]
    return found


def lines(old: Report, new: Report) -> list[Line]:
    """Everything that both files have."""
    after = by_mode(new)
    return [
        Line(case, mode, entry, after[case, mode])
        for (case, mode), entry in by_mode(old).items()
        if (case, mode) in after
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    made.add_argument("old", type=Path, metavar="OLD.json")
    made.add_argument("new", type=Path, metavar="NEW.json")
    made.add_argument("--tolerance", type=float, default=0.1, help="0.1: up to 10 %% slower passes")
    options = made.parse_args(arguments)
    console = Console(soft_wrap=True)
    try:
        old, new = _read(options.old), _read(options.new)
    except ValueError as error:
        console.print(f"can't compare: {error}", markup=False)
        return INCOMPARABLE
    compared = lines(old, new)
    console.print(_table(compared, options.tolerance))
    blocking = obstacles(old, new)
    for reason in blocking:
        console.print(f"can't compare: {reason}", markup=False)
    if blocking:
        return INCOMPARABLE
    slower = [line for line in compared if line.slowdown > options.tolerance]
    for line in slower:
        console.print(f"slower by {line.slowdown:.1%}: {line.name}", markup=False)
    return SLOWER if slower else 0


def _read(path: Path) -> Report:
    """Raises ValueError for a file that does not exist or is no report of this schema."""
    try:
        report = load(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a report of schema {VERSION}: {error}") from error
    if report.version != VERSION:
        raise ValueError(f"{path} has schema {report.version}, this program reads {VERSION}")
    return report


def _table(compared: Sequence[Line], tolerance: float) -> Table:
    table = Table()
    for column in ("case", "mode", "old implementation", "new implementation"):
        table.add_column(column)
    for column in ("old of limit", "new of limit", "slower by"):
        table.add_column(column, justify="right")
    for line in compared:
        table.add_row(
            line.case,
            line.mode,
            line.old.implementation,
            line.new.implementation,
            f"{line.old.ratio:.3f}",
            f"{line.new.ratio:.3f}",
            f"{line.slowdown:+.1%}",
            style="red" if line.slowdown > tolerance else None,
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
