"""The `sglang-k3` command."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_k3 import doctor as examination

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def commands() -> None:
    """Kimi K3 on stock SGLang."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Say whether this installation can serve; exit code 1 when anything is wrong."""
    # Importing SGLang prints notes of its own; standard output belongs to the report.
    with (
        contextlib.redirect_stdout(sys.stderr),
        warnings.catch_warnings(),
        Console(stderr=True).status("Looking at the installation ..."),
    ):
        warnings.simplefilter("ignore")
        report = examination.examine()
    if as_json:
        print(json.dumps({"healthy": report.healthy, **asdict(report)}, indent=2))
    else:
        _show(report, Console())
    if not report.healthy:
        raise typer.Exit(1)


def _show(report: examination.Report, console: Console) -> None:
    findings = Table(box=None)
    for header in ("", "area", "what"):
        findings.add_column(header, no_wrap=True)
    findings.add_column("found", overflow="fold")
    for finding in report.findings:
        mark = Text("ok", "green") if finding.ok else Text("WRONG", "bold red")
        # Text, not str: details hold brackets, which rich would read as markup.
        findings.add_row(mark, finding.area, Text(finding.name), Text(finding.detail))
    console.print(findings)
    if report.choices:
        console.print(_kernels(report))
    wrong = [finding for finding in report.findings if not finding.ok]
    if wrong:
        console.print(Text(f"{len(wrong)} of {len(report.findings)} findings are wrong.", "bold red"))
    else:
        console.print(Text("Everything is in order.", "green"))


def _kernels(report: examination.Report) -> Table:
    """One row for each operator: the implementation for each call, with the refusals before it."""
    calls = list(dict.fromkeys(choice.call for choice in report.choices))
    table = Table(box=None, title="\nKernels chosen on a CPU, and why not others", title_justify="left")
    table.add_column("operator", no_wrap=True)
    for header in calls:
        table.add_column(header, overflow="fold")
    for operator in dict.fromkeys(choice.operator for choice in report.choices):
        cells = []
        for choice in report.choices:
            if choice.operator == operator:
                cell = Text(choice.implementation or "none", "" if choice.implementation else "bold red")
                for refusal in choice.refusals:
                    cell.append(f"\n{refusal}", "dim")
                cells.append(cell)
        table.add_row(Text(operator), *cells)
    return table


def main() -> None:
    """Entry point of the `sglang-k3` script."""
    app()


if __name__ == "__main__":
    main()
