"""The `sglang-k3` command."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sglang_k3 import doctor as examination
from sglang_k3 import doctor_report
from sglang_k3.planning import command
from sglang_k3.prefix_cache import view
from sglang_k3.prefix_cache.outcome import REASONS

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(command.plan)


@app.callback()
def commands() -> None:
    """Kimi K3 on stock SGLang."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    report_to: Annotated[
        Path | None,
        typer.Option(
            "--report", help="Also write a file for a bug report: no paths, names or other variables."
        ),
    ] = None,
) -> None:
    """Say whether this installation can serve; exit code 1 when anything is wrong."""
    if report_to is not None and not os.access(report_to.parent, os.W_OK):
        raise typer.BadParameter(f"--report {report_to}: there is no folder {report_to.parent} to write to")
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
    if report_to is not None:
        doctor_report.write(report, report_to)
        Console(stderr=True).print(f"written: {report_to}", soft_wrap=True)
    if not report.healthy:
        raise typer.Exit(1)


@app.command()
def cache(
    url: Annotated[str, typer.Option(help="The server, which runs with --enable-metrics.")] = (
        "http://127.0.0.1:30000"
    ),
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show a running server's prefix cache: hits, what was lost and why, slots and bytes."""
    if watch and as_json:
        raise typer.BadParameter("--json prints once: leave out --watch")
    try:
        figures = view.read(view.fetch(url))
        if as_json:
            print(json.dumps({**asdict(figures), "hit_share": figures.hit_share}, indent=2))
            return
        if not watch:
            Console().print(_cache_tables(figures))
            return
        with Live(_cache_tables(figures), auto_refresh=False) as live, contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(every)
                live.update(_cache_tables(view.read(view.fetch(url))), refresh=True)
    except view.NoFigures as error:
        Console(stderr=True).print(Text(str(error), "bold red"))
        raise typer.Exit(1) from None


def _cache_tables(figures: view.View) -> Group:
    tokens = Table(box=None, title="Prompt tokens", title_justify="left")
    tokens.add_column("", no_wrap=True)
    tokens.add_column("tokens", justify="right")
    tokens.add_column("share", justify="right")
    tokens.add_column("", overflow="fold")

    def row(name: str, count: int, what: str) -> None:
        share = count / figures.prompt_tokens if figures.prompt_tokens else 0.0
        tokens.add_row(name, f"{count:,}", f"{share:.1%}", what)

    row("prompts", figures.prompt_tokens, "")
    row("hit", figures.hit_tokens, "restored, KV and state")
    for reason, count in figures.lost_tokens.items():
        row(f"lost, {reason.replace('_', ' ')}", count, REASONS[reason])
    slots = Table(box=None, title="\nState slots of one rank", title_justify="left")
    slots.add_column("", no_wrap=True)
    slots.add_column("slots", justify="right")
    slots.add_column("MiB", justify="right")
    for use, count in (*figures.slots.items(), ("all", sum(figures.slots.values()))):
        slots.add_row(use, str(count), f"{count * figures.slot_bytes / 2**20:,.1f}")
    notes = Text(
        f"\nRequests found no slot to start with {figures.waits} times; {figures.skips} states were not "
        f"kept for want of one. Running requests hold {figures.kv_usage:.0%} of the KV cache."
    )
    return Group(tokens, slots, notes)


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
    """One row for each operator: the implementation for each call, with the refusals before it and what would
    be asked behind it."""
    calls = list(dict.fromkeys(choice.call for choice in report.choices))
    title = f"\nKernels chosen for {report.chosen_for}, and why not others"
    table = Table(box=None, title=title, title_justify="left")
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
                if choice.behind:
                    cell.append(f"\nthen {', '.join(choice.behind)}", "dim")
                cells.append(cell)
        table.add_row(Text(operator), *cells)
    return table


def main() -> None:
    """Entry point of the `sglang-k3` script."""
    app()


if __name__ == "__main__":
    main()
