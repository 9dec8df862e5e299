"""What each piece of this project adds to SGLang's own Kimi K3 on a CPU, one at a time, on the real server.

    python -m benchmarks.ablation --model tiny

Starts a server for every stage: from SGLang's class with plain torch to everything, then everything but one
piece, then the stages that speculate at one accept length, whatever the draft is worth. All stages run once,
then all again (three times by default), so that a drift of the machine spreads over them.
`sglang.bench_serving` is the client; a warm-up run in front of each stage is not counted.

An interrupted run goes on behind its last stage, as long as the commit and the question stay the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.machine import describe
from benchmarks.schema import Machine, save
from benchmarks.stages import features
from benchmarks.stages.models import MODELS, Load, Model
from benchmarks.stages.server import VARIABLE
from benchmarks.text import machine_line
from sglang_k3.testing.bench_serving import Figures, bench_serving, random_ids
from sglang_k3.testing.server_process import ServerProcess

FLAGS = ("--device", "cpu", "--page-size", "16", "--max-running-requests", "8", "--enable-cache-report")
FLAGS += ("--max-mamba-cache-size", "64", "--max-total-tokens", "65536")

LONG_LOADS: tuple[Load, ...] = ((random_ids(16_000, 64), 1, 4), (random_ids(16_000, 64), 8, 8))
_WARM_UP: Load = (random_ids(256, 16), 4, 4)


class Run(msgspec.Struct, forbid_unknown_fields=True):
    """One stage on one server. memory_bytes: resident in all processes of the server, behind the loads."""

    stage: str
    repeat: int
    memory_bytes: int
    figures: list[Figures]


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """docs/benchmarks/ablation-MODEL.json (or -long). stages: in order; alone: everything but one piece;
    pinned: stages whose every verify step accepts as many tokens."""

    machine: Machine
    model: str
    regime: str
    flags: list[str]
    repeats: int
    stages: list[str]
    alone: list[str]
    runs: list[Run]
    pinned: list[str] = []

    def seconds(self, stage: str, workload: str, concurrency: int) -> list[float]:
        """Duration of the load in each repeat."""
        return [f.seconds for f in self.figures(stage, workload, concurrency)]

    def figures(self, stage: str, workload: str, concurrency: int) -> list[Figures]:
        return [
            f
            for run in self.runs
            if run.stage == stage
            for f in run.figures
            if f.workload == workload and f.concurrency == concurrency
        ]


def measure_stage(model: Model, stage: features.Stage, loads: Iterable[Load]) -> tuple[int, list[Figures]]:
    """Resident bytes and figures of a fresh server with this stage's features on."""
    on = stage.on
    checkpoint = model.packed if features.is_on(on, "packed") else model.dense
    flags = (
        "--model-path",
        str(checkpoint),
        "--dtype",
        model.dtype,
        *FLAGS,
        *features.server_flags(on, model.draft),
    )
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(
            *flags,
            log=Path(folder) / "server.log",
            env={VARIABLE: ",".join(sorted(on)), **features.server_env(stage)},
            module="benchmarks.stages.server",
        )
        with server:
            bench_serving(server.url, checkpoint, *_WARM_UP)
            figures = [bench_serving(server.url, checkpoint, *load) for load in loads]
            return server.resident_bytes(), figures


KINDS = {
    "all": "every stage, then everything but one piece, then those that speculate at one accept length",
    "stages": "every stage",
    "ends": "the first stage, everything, and everything but speculation",
}


def measure(
    model: Model, loads: tuple[Load, ...], repeats: int, kind: str, console: Console, state: Path
) -> Report:
    """kind: one of KINDS. state: where the runs so far are kept."""
    has_draft = model.draft is not None
    stages = features.cumulative(has_draft)
    if kind == "ends":
        plain = [stage for stage in stages if features.SPECULATION not in stage.on]
        stages = [stages[0], plain[-1], *([stages[-1]] if has_draft else [])]
    alone = features.leave_one_out(has_draft) if kind == "all" else []
    pinned = features.pinned(has_draft) if kind == "all" else []
    shown, left_out, held = ([stage.label for stage in group] for group in (stages, alone, pinned))
    report = Report(
        describe(), model.name, model.regime, list(FLAGS), repeats, shown, left_out, runs=[], pinned=held
    )
    report.runs.extend(_runs_so_far(report, loads, state))
    done = {(run.stage, run.repeat) for run in report.runs}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        everything = stages + alone + pinned
        task = progress.add_task("", total=repeats * len(everything))
        for repeat in range(repeats):
            for stage in everything:
                progress.update(task, description=f"{repeat + 1} of {repeats}: {stage.label}")
                if (stage.label, repeat) not in done:
                    memory, figures = measure_stage(model, stage, loads)
                    report.runs.append(Run(stage.label, repeat, memory, figures))
                    save(report, state)
                    console.print(f"{stage.label}: " + ", ".join(f"{f.seconds:.2f} s" for f in figures))
                progress.advance(task)
    return report


def _runs_so_far(report: Report, loads: tuple[Load, ...], state: Path) -> list[Run]:
    """The runs of an interrupted measurement of the very same thing, else none."""
    if not state.exists():
        return []
    kept = msgspec.json.decode(state.read_bytes(), type=Report)
    asked = [(workload.name, concurrency) for workload, concurrency, _ in loads]
    same = (
        kept.machine.commit == report.machine.commit
        and kept.stages == report.stages
        and (kept.alone, kept.pinned) == (report.alone, report.pinned)
        and kept.repeats == report.repeats
        and all([(f.workload, f.concurrency) for f in run.figures] == asked for run in kept.runs)
    )
    return kept.runs if same else []


def markdown(report: Report) -> str:
    parts = [
        f"# Ablation on {report.model}\n",
        "Written by `python -m benchmarks.ablation`; the raw figures are in the JSON file beside it.\n",
        f"{report.regime}\n",
        f"{machine_line(report.machine)} Medians of {report.repeats} interleaved repeats. Times by "
        "`sglang.bench_serving`.\n",
    ]
    for load in dict.fromkeys((f.workload, f.concurrency) for f in report.runs[0].figures):
        parts.append(f"## {load[0]}, {load[1]} at once\n")
        parts.append(_table(report, *load))
    return "\n".join(parts)


def _table(report: Report, workload: str, concurrency: int) -> str:
    head = "| stage | seconds | gain over the one before | tokens/s | TTFT ms, median / p99 "
    head += "| TPOT ms, median / p99 | cached tokens | memory |\n| --- " + 7 * "| --: " + "|\n"
    alone = head.replace("gain over the one before", "what the piece gains in the full stack")

    def gain(before: str, after: str) -> str:
        return _gain(report, before, after, workload, concurrency)

    def rows(stages: Sequence[str], gains: Sequence[str]) -> str:
        lines = (_row(report, *line, workload, concurrency) for line in zip(stages, gains, strict=True))
        return "\n".join(lines) + "\n"

    def over_the_one_before(stages: Sequence[str]) -> list[str]:
        return ["", *(gain(before, after) for before, after in pairwise(stages))]

    first, last = report.stages[0], report.stages[-1]
    text = head + rows(report.stages, over_the_one_before(report.stages))
    text += f"\nFrom first to last: {gain(first, last)}.\n"
    plain = without_speculation(report.stages)
    if 1 < len(plain) < len(report.stages):
        text += f"From first to the last without speculation: {gain(first, plain[-1])}.\n"
    if report.alone:
        text += "\n" + alone + rows(report.alone, [gain(stage, last) for stage in report.alone])
    if report.pinned:
        text += "\n" + head + rows(report.pinned, over_the_one_before(report.pinned))
    return text


def without_speculation(stages: Sequence[str]) -> list[str]:
    speculating = {stage.label for stage in features.cumulative() if features.SPECULATION in stage.on}
    return [stage for stage in stages if stage not in speculating]


def _row(report: Report, stage: str, gain: str, workload: str, concurrency: int) -> str:
    figures = report.figures(stage, workload, concurrency)

    def median(attribute: str) -> float:
        return statistics.median(getattr(f, attribute) for f in figures)

    memory = statistics.median(run.memory_bytes for run in report.runs if run.stage == stage)
    return (
        f"| {stage} | {median('seconds'):.2f} | {gain} | {median('total_tokens_per_second'):.0f} "
        f"| {median('median_ttft_ms'):.0f} / {median('p99_ttft_ms'):.0f} "
        f"| {median('median_tpot_ms'):.1f} / {median('p99_tpot_ms'):.1f} "
        f"| {median('cached_tokens'):.0f} | {memory / 2**20:.0f} MiB |"
    )


def _gain(report: Report, before: str, after: str, workload: str, concurrency: int) -> str:
    """Ratio of the medians with the smallest and largest ratio of one repeat; "none" if they straddle 1."""
    slow, fast = (report.seconds(stage, workload, concurrency) for stage in (before, after))
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    ratio = statistics.median(slow) / statistics.median(fast)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"none ({spread})" if min(ratios) <= 1 <= max(ratios) else f"{ratio:.2f} times ({spread})"


def plot(report: Report, path: Path) -> None:
    """A waterfall of the duration by stage, one panel a load; what each piece gains in the full stack; then
    latency by concurrency, a line a stage."""
    from matplotlib.figure import Figure

    loads = list(dict.fromkeys((f.workload, f.concurrency) for f in report.runs[0].figures))
    figure = Figure(figsize=(5 * len(loads), 15), layout="constrained")
    waterfalls, alone, latencies = figure.subplots(3, len(loads), squeeze=False)
    for axes, (workload, concurrency) in zip(waterfalls, loads, strict=True):
        medians = [statistics.median(report.seconds(s, workload, concurrency)) for s in report.stages]
        for row, seconds in enumerate(medians):
            before = medians[row - 1] if row else 0.0
            axes.barh(
                row, seconds - before, left=before, color="tab:green" if seconds < before else "tab:gray"
            )
            axes.text(max(seconds, before), row, f" {seconds:.2f} s", va="center", fontsize=8)
        axes.set_yticks(range(len(medians)), report.stages, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.2 * max(medians))
        axes.set_xlabel("seconds")
        axes.set_title(f"{workload}, {concurrency} at once", fontsize=9)
    for axes, load in zip(alone, loads, strict=True):
        _plot_alone(report, axes, *load)
    _plot_latency(report, latencies, loads)
    figure.savefig(path, dpi=100)


def _plot_alone(report: Report, axes: Any, workload: str, concurrency: int) -> None:
    """How many times slower without each piece; lines from the smallest to the largest ratio of a repeat."""
    if not report.alone:
        axes.set_axis_off()
        return
    full = report.seconds(report.stages[-1], workload, concurrency)
    for row, stage in enumerate(report.alone):
        without = report.seconds(stage, workload, concurrency)
        ratios = [a / b for a, b in zip(without, full, strict=True)]
        axes.plot([min(ratios), max(ratios)], [row, row], color="tab:gray")
        axes.plot(statistics.median(without) / statistics.median(full), row, "o", color="tab:green")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(report.alone)), report.alone, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("times the full stack's seconds")
    axes.set_title(f"{workload}, {concurrency} at once", fontsize=9)


def _plot_latency(report: Report, panels: Sequence[Any], loads: list[tuple[str, int]]) -> None:
    """TTFT and TPOT of the workload that was asked at more than one concurrency."""
    by_workload: dict[str, list[int]] = {}
    for workload, concurrency in loads:
        by_workload.setdefault(workload, []).append(concurrency)
    workload, concurrencies = max(by_workload.items(), key=lambda item: len(item[1]))
    for axes, name in zip(panels, ("median_ttft_ms", "median_tpot_ms"), strict=False):
        for stage in report.stages:
            medians = [
                statistics.median(getattr(f, name) for f in report.figures(stage, workload, concurrency))
                for concurrency in concurrencies
            ]
            axes.plot(concurrencies, medians, "o-", label=stage)
        axes.set_xticks(concurrencies)
        axes.set_yscale("log")
        axes.set_xlabel("requests at once")
        axes.set_ylabel(name.replace("_", " "))
        axes.set_title(workload, fontsize=9)
    panels[0].legend(fontsize=7)
    for axes in panels[2:]:
        axes.set_axis_off()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--long", action="store_true", help="16,000-token prompts instead (ablation-MODEL-long)"
    )
    parser.add_argument(
        "--kind", choices=KINDS, default="all", help="; ".join(f"{k}: {v}" for k, v in KINDS.items())
    )
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--work", type=Path, default=Path(".cache"), help="folder of an interrupted run")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments.work.mkdir(parents=True, exist_ok=True)
    name = f"ablation-{arguments.model}{'-long' if arguments.long else ''}"
    state = arguments.work / f"{name}.json"
    with tempfile.TemporaryDirectory() as work:
        model = MODELS[arguments.model](Path(work))
        report = measure(
            model,
            LONG_LOADS if arguments.long else model.loads,
            arguments.repeats,
            arguments.kind,
            Console(file=sys.stderr),
            state,
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    save(report, arguments.out / f"{name}.json")
    (arguments.out / f"{name}.md").write_text(markdown(report))
    plot(report, arguments.out / f"{name}.png")
    state.unlink()
    print(markdown(report))


if __name__ == "__main__":
    main()
