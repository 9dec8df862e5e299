"""Time every operator of the serving path: JSON, table and plot.

python -m benchmarks.kernels [--quick] [--only OPERATOR] [--full] [--out DIR]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine, plot, report, runner, schema
from benchmarks.cases import Case, Sizes, all_cases
from benchmarks.cases.kda import transformers_bytes
from benchmarks.measure import Protocol
from sglang_k3.kernels import registry

QUICK = Protocol(
    rounds=3,
    probe_samples=2,
    sample_seconds=0.001,
    cold_bytes=4 << 20,
    portion_bytes=1 << 20,
    matmul_size=256,
)
_FILE_WIDTH = 150


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    made.add_argument("--quick", action="store_true", help="small shapes, few rounds: does it work at all?")
    made.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="OPERATOR",
        help="a registry key such as kda.decode, or a case such as mla_decode_fp32 (may be repeated)",
    )
    made.add_argument(
        "--full",
        action="store_true",
        help="transformers' rule at the longest prefill too: minutes, and about 17 GB of memory",
    )
    made.add_argument("--out", type=Path, default=machine.ROOT / "docs" / "benchmarks", metavar="DIR")
    return made


def select(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """The cases of these names or operators, all without any. Raises ValueError for one that is neither."""
    known = {name for case in cases for name in (case.name, case.operator)}
    unknown = sorted(set(only) - known)
    if unknown:
        raise ValueError(f"unknown operator {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return [case for case in cases if not only or case.name in only or case.operator in only]


def main(arguments: Sequence[str] | None = None, resolve: runner.Resolve = registry.resolve) -> int:
    """0, or 1 where a line of the table is not valid. `resolve` chooses implementations."""
    made = parser()
    options = made.parse_args(arguments)
    sizes = Sizes.quick() if options.quick else Sizes.full()
    if options.full:
        needed = transformers_bytes(sizes.prefill_tokens, sizes.prefill_heads, sizes.head_dim)
        if psutil.virtual_memory().available < needed:
            made.error(f"--full needs {needed >> 30} GiB of free memory")
    try:
        cases = select(all_cases(sizes, options.full), options.only)
    except ValueError as error:
        made.error(str(error))

    protocol = (
        QUICK if options.quick else replace(Protocol(), cold_bytes=machine.cold_bytes(machine.l3_bytes()))
    )
    settings = schema.Settings(
        regime="quick" if options.quick else "full",
        rounds=protocol.rounds,
        cold_bytes=protocol.cold_bytes,
        probe_samples=protocol.probe_samples,
        probe_tolerance=protocol.tolerance,
        attempts_allowed=protocol.attempts,
        only=sorted(options.only),
    )
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    with Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("", total=len(cases) + 2)

        def begin(name: str) -> None:
            if not console.is_terminal:
                console.log(name)
            progress.update(task, description=name, advance=0 if progress.tasks[0].description == "" else 1)

        result = runner.run(cases, settings, protocol, resolve=resolve, begin=begin)
        progress.update(task, description="done", completed=len(cases) + 2)

    console.print(report.screen(result))
    for name, reading in result.probes.items():
        console.print(report.probe_line(name, reading))
    for key, value in report.figures(result):
        console.print(f"{key} = {value}")
    write(result, options.out)
    return 0 if result.valid else 1


def write(result: schema.Report, folder: Path) -> None:
    """kernels.json, .md and .png; a part or a quick run goes to names of its own, beside the whole ones."""
    only = result.settings.only
    stem = "-".join(["kernels", *(["quick"] if result.settings.regime == "quick" else []), *only])
    folder.mkdir(parents=True, exist_ok=True)
    schema.save(result, folder / f"{stem}.json")
    report.write(result, folder / f"{stem}.md", f"{stem}.png")
    plot.roofline(result, folder / f"{stem}.png")


if __name__ == "__main__":
    raise SystemExit(main())
