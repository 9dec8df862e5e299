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

from benchmarks.schema import VERSION, Entry, R, Report, load

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
    options = parse("compare", __doc__, 0.1, arguments)
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


def parse(
    name: str, description: str | None, tolerance: float, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """A gate's old, new and tolerance; name: of its module in benchmarks."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    made.add_argument("old", type=Path, metavar="OLD.json")
    made.add_argument("new", type=Path, metavar="NEW.json")
    passes = f"{tolerance}: up to {100 * tolerance:.0f} %% slower passes"
    made.add_argument("--tolerance", type=float, default=tolerance, help=passes)
    return made.parse_args(arguments)


def read(path: Path, kind: type[R], what: str) -> R:
    """Raises ValueError for a file that does not exist or is no report of that kind."""
    try:
        return load(path, kind)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a report of {what}: {error}") from error


def _read(path: Path) -> Report:
    """Raises ValueError for a file that does not exist or is no report of this schema."""
    report = read(path, Report, f"schema {VERSION}")
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
