"""`sglang.bench_serving` against a real server, by workload and concurrency; JSON and a Markdown table.

    python -m benchmarks.serving --model-path examples/tiny-k3 [flags of sglang.launch_server]

Every run starts on an emptied prefix cache, behind one run that warms the server up and is not counted.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from itertools import product
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.machine import describe
from benchmarks.schema import Machine, save
from benchmarks.text import machine_line
from sglang_k3.testing.bench_serving import Figures, bench_serving, random_ids, shared_prefix
from sglang_k3.testing.server_process import ServerProcess

WORKLOADS = (random_ids(256, 64), shared_prefix(512, 64, 64))
CONCURRENCIES = (1, 4, 16)
REQUESTS = 32
_WARM_UP = (random_ids(256, 16), 4, 4)


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """docs/benchmarks/serving.json. flags: the server's. runs: in the order they were made."""

    machine: Machine
    model: str
    flags: list[str]
    runs: list[Figures]


def measure(model: Path, flags: list[str], console: Console) -> Report:
    """Start a server and run everything on it. Raises StartFailed, BenchFailed."""
    cases = list(product(WORKLOADS, CONCURRENCIES))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as progress:
        task = progress.add_task("starting the server", total=len(cases) + 1)
        command = ("--model-path", str(model), "--enable-cache-report", *flags)
        with ServerProcess(*command, log=Path(folder) / "server.log") as server:
            progress.update(task, description="warming up")
            bench_serving(server.url, model, *_WARM_UP)
            progress.advance(task)
            runs = []
            for workload, concurrency in cases:
                progress.update(task, description=f"{workload.name}, {concurrency} at once")
                runs.append(bench_serving(server.url, model, workload, concurrency, REQUESTS))
                progress.advance(task)
    return Report(describe(), str(model), flags, runs)


def markdown(report: Report) -> str:
    rows = "\n".join(
        f"| {run.workload} | {run.concurrency} | {run.requests} | {run.prompt_tokens} "
        f"| {run.cached_tokens / run.prompt_tokens:.0%} | {run.new_tokens} "
        f"| {run.total_tokens_per_second:.0f} | {run.new_tokens_per_second:.0f} "
        f"| {run.median_ttft_ms:.0f} / {run.p99_ttft_ms:.0f} "
        f"| {run.median_tpot_ms:.1f} / {run.p99_tpot_ms:.1f} |"
        for run in report.runs
    )
    return f"""\
# Serving {report.model}

Written by `python -m benchmarks.serving`; the raw figures are in serving.json. A regime in which the fixed
cost of a step is nearly everything: some millions of parameters say nothing about a large model's speed.

{machine_line(report.machine)} Server flags: `{" ".join(report.flags)}`.

| workload | concurrency | requests | prompt tokens | of them cached | new tokens | tokens/s \
| new tokens/s | TTFT ms, median / p99 | TPOT ms, median / p99 |
| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--model-path", type=Path, default=Path("examples/tiny-k3"))
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="folder of the two files")
    known, flags = parser.parse_known_args()
    # The server and its client share this machine: spinning threads would take each other's cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    report = measure(known.model_path, flags, Console())
    known.out.mkdir(parents=True, exist_ok=True)
    save(report, known.out / "serving.json")
    (known.out / "serving.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
