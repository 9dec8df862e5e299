"""A report as a table on the screen and in Markdown, from the same rows."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from benchmarks.schema import Entry, Reading, Report

_UNITS = {"stream": "GB/s", "copy": "GB/s", "read": "GB/s"}
COLUMNS = (
    "case",
    "mode",
    "implementation",
    "time",
    "spread",
    "GB/s",
    "GFLOP/s",
    "limit",
    "of limit",
    "valid",
)
_NUMBERS = {"time", "spread", "GB/s", "GFLOP/s", "of limit"}


def row(entry: Entry) -> tuple[str, ...]:
    """The cells of COLUMNS."""
    return (
        entry.case,
        ", ".join(entry.modes),
        entry.implementation,
        seconds(entry.seconds),
        f"{entry.spread:.0%}",
        f"{entry.gbytes_per_second:.1f}",
        f"{entry.gflops_per_second:.1f}",
        entry.limit,
        f"{entry.ratio:.2f}",
        "yes" if entry.valid else "NO",
    )


def seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def probe_line(name: str, reading: Reading) -> str:
    unit = _UNITS.get(name, "GFLOP/s")
    return f"{name} {reading.before:.1f} -> {reading.after:.1f} {unit} (peak {reading.peak:.1f})"


def figures(report: Report) -> list[tuple[str, str]]:
    """The named figures that this report has, as (key, value)."""
    found: list[tuple[str, str]] = []
    for group in ("kda_decode", "kda_prefill", "mxfp4"):
        values = getattr(report, group)
        for key in values.__struct_fields__ if values is not None else ():
            value = getattr(values, key)
            if value is not None:
                found.append((f"{group}.{key}", f"{value:.3g}" if isinstance(value, float) else str(value)))
    return found


def screen(report: Report) -> Table:
    table = Table(title=_title(report))
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", no_wrap=column == "case")
    for entry in report.entries:
        table.add_row(*row(entry), style=None if entry.valid else "red")
    return table


def markdown(report: Report, plot: str) -> str:
    """`plot` is the picture's file name, beside the Markdown file."""
    machine, settings = report.machine, report.settings
    l3 = "unknown" if machine.l3_bytes is None else f"{machine.l3_bytes >> 20} MiB"
    lines = [
        f"# {_title(report)}",
        "",
        "Written by `python -m benchmarks.kernels`; docs/benchmarks.md explains every column and key.",
        "",
        f"{machine.cpu}, {machine.cores} cores, L3 {l3}, {machine.threads} threads, "
        f"{machine.torch_capability}, huge pages {machine.huge_pages}, load {machine.load_average:.2f} at "
        f"the start; {', '.join(f'{name} {version}' for name, version in machine.versions.items())}; commit "
        f"{machine.commit}, {machine.date}.",
        "",
        f"{settings.rounds} interleaved rounds, {settings.cold_bytes / (1 << 30):.3g} GiB between two uses "
        f"of the same bytes, probes before and after within {settings.probe_tolerance:.0%}.",
        "",
        *(f"- {probe_line(name, reading)}" for name, reading in report.probes.items()),
        "",
    ]
    if report.settings.regime == "quick":
        lines += [
            "**Quick run: small shapes, few rounds. It shows that the benchmark works, not a speed.**",
            "",
        ]
    if not report.valid:
        lines += ["**Not valid: the probes of at least one line disagreed in every attempt.**", ""]
    lines += _table(("figure", "value"), figures(report), numbers={"value"})
    lines += ["", *_table(COLUMNS, [row(entry) for entry in report.entries], numbers=_NUMBERS)]
    if report.peers:
        peer_rows = [
            (peer.case, peer.name, seconds(peer.seconds), f"{peer.spread:.0%}", "yes" if peer.valid else "NO")
            for peer in report.peers
        ]
        lines += ["", *_table(("case", "peer", "time", "spread", "valid"), peer_rows, numbers=_NUMBERS)]
    notes = {entry.case: entry.note for entry in report.entries if entry.note}
    lines += ["", *(f"- {case}: {note}" for case, note in notes.items())]
    return "\n".join([*lines, "", f"![Achieved against limit]({plot})", ""])


def write(report: Report, path: Path, plot: str) -> None:
    path.write_text(markdown(report, plot))


def _title(report: Report) -> str:
    return f"Kernels on {report.machine.cpu}, {report.settings.regime} run"


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]], numbers: set[str]) -> list[str]:
    """Aligned Markdown: figures to the right."""
    head = [f"| {' | '.join(columns)} |"]
    head.append(f"| {' | '.join('---:' if column in numbers else '---' for column in columns)} |")
    return head + [f"| {' | '.join(cells)} |" for cells in rows]
