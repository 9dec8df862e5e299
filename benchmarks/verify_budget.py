"""Whether the verify budget is right to speculate: three servers under a load that swings.

    python -m benchmarks.verify_budget [--out DIR] [--repeats 3]

The trained tiny target without a draft, with one and every row verified, and with the budget
(SGLANG_RAGGED_VERIFY_MODE=compact); 1 to 16 requests at once, of text that the draft knows and text that it
does not. Each point is asked of all three in turn.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.machine import describe
from benchmarks.schema import Machine, save
from benchmarks.stages.models import TINY, TINY_DRAFT
from benchmarks.text import machine_line
from sglang_k3.speculative.row_planner import VARIABLE
from sglang_k3.testing.server_process import ServerProcess, draft_flags
from sglang_k3.testing.streams import Streamed, generate_ids
from sglang_k3.training import tokenizer as bpe
from sglang_k3.training.completions import function_heads
from sglang_k3.training.data import read_corpus
from sglang_k3.training.dataset import SEPARATOR

SERVERS = ("off", "static", "budget")
SWING = ((1, "easy"), (16, "easy"), (4, "hard"), (1, "hard"), (8, "easy"), (16, "hard"), (4, "easy"))
NEW_TOKENS = 96


class Point(msgspec.Struct, forbid_unknown_fields=True):
    """Tokens a second by server, median of the repeats; accept_length: tokens a verify step and request, of
    the servers with a draft. against_better: the budget's rate by that of the better of the other two."""

    requests: int
    text: str
    tokens_per_second: dict[str, float]
    accept_length: dict[str, float]
    against_better: float


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """docs/benchmarks/verify_budget.json. whole: tokens a second over all points, each counted once."""

    machine: Machine
    repeats: int
    points: list[Point]
    whole: dict[str, float]


def _server(folder: Path, name: str) -> ServerProcess:
    flags = ("--model-path", str(TINY), "--device", "cpu", "--dtype", "bfloat16", "--page-size", "16")
    flags += ("--max-running-requests", "16", "--max-mamba-cache-size", "96", "--max-total-tokens", "32768")
    draft = () if name == "off" else draft_flags(TINY_DRAFT)
    env = {VARIABLE: "compact"} if name == "budget" else {}
    log = folder / f"{name}.log"
    return ServerProcess(*flags, "--disable-radix-cache", *draft, log=log, env=env)


def _prompts(count: int, text: str, heads: list[list[int]]) -> list[tuple[list[int], dict[str, float]]]:
    if text == "easy":
        return [(heads[i % len(heads)], {"temperature": 0.0}) for i in range(count)]
    draw = random.Random(count)
    return [([draw.randrange(2000) for _ in range(40)], {"temperature": 1.0}) for _ in range(count)]


def _load(url: str, asked: list[tuple[list[int], dict[str, float]]]) -> tuple[float, float]:
    """(tokens a second, tokens a verify step) of requests that begin together."""

    def ask(one: tuple[list[int], dict[str, float]]) -> Streamed:
        ids, sampling = one
        return generate_ids(url, ids, {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **sampling})

    began = time.perf_counter()
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(ask, asked))
    seconds = time.perf_counter() - began
    tokens = sum(answer.new_tokens for answer in answers)
    steps = sum(answer.verify_steps for answer in answers)
    return tokens / seconds, (tokens - len(answers)) / max(1, steps)


def measure(repeats: int, console: Console) -> tuple[list[Point], dict[str, float]]:
    tokenizer = bpe.load(TINY)
    heads = [[SEPARATOR, *tokenizer.encode(head).ids] for head in function_heads(read_corpus().held_out)]
    rates: dict[tuple[tuple[int, str], str], list[float]] = {}
    lengths: dict[tuple[tuple[int, str], str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        servers = {each: running.enter_context(_server(Path(name), each)) for each in SERVERS}
        for repeat in range(-1, repeats):  # the first round warms up, and lets the budget learn the times
            for point in SWING:
                asked = _prompts(*point, heads)
                for each, server in servers.items():
                    with console.status(f"round {repeat + 1} of {repeats}: {point}, {each} ..."):
                        rate, length = _load(server.url, asked)
                    if repeat >= 0:
                        rates.setdefault((point, each), []).append(rate)
                        lengths.setdefault((point, each), []).append(length)
    points = []
    for point in SWING:
        by_server = {each: statistics.median(rates[point, each]) for each in SERVERS}
        accepted = {each: statistics.fmean(lengths[point, each]) for each in SERVERS[1:]}
        better = max(by_server["off"], by_server["static"])
        points.append(Point(*point, by_server, accepted, by_server["budget"] / better))
    tokens = sum(point.requests for point in points)
    whole = {
        each: tokens / sum(point.requests / point.tokens_per_second[each] for point in points)
        for each in SERVERS
    }
    return points, whole


def markdown(report: Report) -> str:
    parts = [
        "# The verify budget\n",
        f"Written by `python -m benchmarks.verify_budget`. {machine_line(report.machine)}\n",
        f"tiny-k3 in bf16, {NEW_TOKENS} new tokens a request, medians of {report.repeats} rounds over the "
        "points in this order, tokens a second. off: no draft; static: every drafted row verified; budget: "
        "as many as pay. easy: held-out function heads, greedy; hard: random tokens, temperature 1. It shows "
        "one small model on this CPU, whose client takes part of the two cores, and nothing about an NPU.\n",
        "| requests | text | off | static | budget | budget by the better | tokens a step, static | budget |",
        "| --: | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for point in report.points:
        rates = [f"{point.tokens_per_second[each]:.0f}" for each in SERVERS]
        rest = [point.against_better, *(point.accept_length[each] for each in SERVERS[1:])]
        cells = " | ".join([*rates, *(f"{value:.2f}" for value in rest)])
        parts.append(f"| {point.requests} | {point.text} | {cells} |")
    cells = " | ".join(f"{report.whole[each]:.0f}" for each in SERVERS)
    best = max(report.whole["off"], report.whole["static"])
    parts.append(f"| all | | {cells} | {report.whole['budget'] / best:.2f} | | |")
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    points, whole = measure(arguments.repeats, Console(file=sys.stderr))
    report = Report(describe(), arguments.repeats, points, whole)
    arguments.out.mkdir(parents=True, exist_ok=True)
    save(report, arguments.out / "verify_budget.json")
    (arguments.out / "verify_budget.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
