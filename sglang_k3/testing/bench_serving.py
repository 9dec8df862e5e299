"""Runs `sglang.bench_serving` against a server and reads its figures.

Each run is a process of its own, forked from one that has imported the client: importing it takes a quarter
of a minute, and an ablation asks a hundred times.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 1800
_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["sglang.benchmark.serving"])


@dataclass(frozen=True)
class Workload:
    """What bench_serving sends: its dataset, and the flags that size it."""

    name: str
    dataset: str
    flags: tuple[str, ...]


def random_ids(prompt_tokens: int, new_tokens: int) -> Workload:
    """Prompts of token ids drawn evenly; nothing for a prefix cache."""
    lengths = ("--random-input-len", str(prompt_tokens), "--random-output-len", str(new_tokens))
    return Workload(
        f"random-ids {prompt_tokens}/{new_tokens}", "random-ids", (*lengths, "--random-range-ratio", "1")
    )


def shared_prefix(prefix_tokens: int, question_tokens: int, new_tokens: int) -> Workload:
    """Four groups of prompts, each behind a system prompt of its own, which a prefix cache serves."""
    return Workload(
        f"generated-shared-prefix {prefix_tokens}+{question_tokens}/{new_tokens}",
        "generated-shared-prefix",
        (
            *("--gsp-num-groups", "4", "--gsp-system-prompt-len", str(prefix_tokens)),
            *("--gsp-question-len", str(question_tokens), "--gsp-output-len", str(new_tokens)),
        ),
    )


class BenchFailed(RuntimeError):
    """bench_serving ended with an error, or a request of it was not answered."""


@dataclass(frozen=True)
class Figures:
    """What bench_serving measured: tokens a second, times in milliseconds."""

    workload: str
    concurrency: int
    requests: int
    prompt_tokens: int
    new_tokens: int
    cached_tokens: int
    seconds: float
    total_tokens_per_second: float
    new_tokens_per_second: float
    median_ttft_ms: float
    p99_ttft_ms: float
    median_tpot_ms: float
    p99_tpot_ms: float


def bench_serving(url: str, model: Path, workload: Workload, concurrency: int, requests: int) -> Figures:
    """One run on an emptied cache. bench_serving forces the number of new tokens (ignore_eos).

    requests: a multiple of 4. Raises BenchFailed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.jsonl"
        command = ["--backend", "sglang", "--base-url", url]
        command += ["--model", str(model), "--dataset-name", workload.dataset, *workload.flags]
        # One dataset reads the number of prompts, the other the size of its groups.
        command += ["--num-prompts", str(requests), "--gsp-prompts-per-group", str(requests // 4)]
        command += ["--max-concurrency", str(concurrency), "--seed", "1", "--flush-cache", "--disable-tqdm"]
        command += ["--cache-report", "--temperature", "0", "--output-details"]
        command += ["--output-file", str(output)]
        log = Path(folder) / "log"
        log.touch()
        client = _FORKED.Process(target=_run_client, args=(command, log))
        client.start()
        client.join(LIMIT_S)
        if client.exitcode is None:
            client.kill()
            client.join()
            raise BenchFailed(f"bench_serving was not done after {LIMIT_S} s:\n{log.read_text()[-3000:]}")
        if client.exitcode or not output.exists():
            raise BenchFailed(f"bench_serving ended with {client.exitcode}:\n{log.read_text()[-3000:]}")
        measured = json.loads(output.read_text().splitlines()[-1])
    errors = [error for error in measured["errors"] if error]
    if errors or measured["completed"] != requests:
        raise BenchFailed(f"{measured['completed']} of {requests} requests were answered: {errors[:3]}")
    return Figures(
        workload=workload.name,
        concurrency=concurrency,
        requests=measured["completed"],
        prompt_tokens=measured["total_input_tokens"],
        new_tokens=measured["total_output_tokens"],
        cached_tokens=measured["cache_report"]["total_cached_tokens"],
        seconds=measured["duration"],
        total_tokens_per_second=measured["total_throughput"],
        new_tokens_per_second=measured["output_throughput"],
        median_ttft_ms=measured["median_ttft_ms"],
        p99_ttft_ms=measured["p99_ttft_ms"],
        median_tpot_ms=measured["median_tpot_ms"],
        p99_tpot_ms=measured["p99_tpot_ms"],
    )


def _run_client(arguments: list[str], log: Path) -> None:
    """In the child: what `python -m sglang.bench_serving` does, its output into the log."""
    with log.open("w") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    from sglang.benchmark.serving import cli_main

    sys.argv = ["sglang.bench_serving", *arguments]
    cli_main()
