"""Whether the verify budget is right to speculate: three servers under a load that swings.

    python -m benchmarks.verify_budget [--out DIR] [--repeats 3]

The trained tiny target without a draft, with one and every row verified, and with the budget
(SGLANG_RAGGED_VERIFY_MODE=compact); 1 to 16 clients, of text that the draft knows and text that it
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
from typing import NamedTuple

import msgspec
from rich.console import Console

from benchmarks.machine import describe
from benchmarks.schema import Machine, save
from benchmarks.stages.models import TINY, TINY_DRAFT
from benchmarks.text import machine_line
from sglang_k3.speculative.row_planner import VARIABLE
from sglang_k3.testing.server_process import ServerProcess, draft_flags
from sglang_k3.testing.streams import post
from sglang_k3.training import tokenizer as bpe
from sglang_k3.training.completions import function_heads
from sglang_k3.training.data import read_corpus
from sglang_k3.training.dataset import SEPARATOR

SERVERS = ("off", "static", "budget")
SWING = ((1, "easy"), (16, "easy"), (4, "hard"), (1, "hard"), (8, "easy"), (16, "hard"), (4, "easy"))
NEW_TOKENS = 96
REQUESTS = 4
"""Of each client at each point."""


class Point(msgspec.Struct, forbid_unknown_fields=True):
    """Tokens a second by server, median of the repeats; accept_length: tokens a verify step and request, of
    the servers with a draft. against_better: the budget's rate by that of the better of the other two."""

    clients: int
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


Prompt = tuple[list[int], dict[str, float]]
"""Token ids, and how to sample."""


def _prompts(count: int, text: str, heads: list[list[int]]) -> list[Prompt]:
    if text == "easy":
        return [(heads[i % len(heads)], {"temperature": 0.0}) for i in range(count)]
    draw = random.Random(count)
    return [([draw.randrange(2000) for _ in range(40)], {"temperature": 1.0}) for _ in range(count)]


class Answer(NamedTuple):
    """One request: when it was asked and answered, in seconds; tokens; verify steps of a draft's server."""

    asked: float
    answered: float
    tokens: int
    steps: int


def _ask(url: str, prompt: Prompt) -> Answer:
    ids, sampling = prompt
    asked = time.perf_counter()
    options = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **sampling}
    meta = post(f"{url}/generate", {"input_ids": ids, "sampling_params": options})["meta_info"]
    return Answer(asked, time.perf_counter(), meta["completion_tokens"], meta.get("spec_verify_ct") or 0)


def _load(url: str, clients: int, prompts: list[Prompt]) -> tuple[float, float]:
    """(tokens a second, tokens a verify step) while each client has a request under way."""
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda prompt: _ask(url, prompt), prompts))
    return rate(answers), sum(a.tokens - 1 for a in answers) / max(1, sum(a.steps for a in answers))


def rate(answers: list[Answer]) -> float:
    """Tokens a second until the last request was asked. Behind it clients run dry, and the slowest request
    alone would be timed; of those under way then the part before counts."""
    began, end = min(a.asked for a in answers), max(a.asked for a in answers)
    shares = [min(1.0, (end - a.asked) / (a.answered - a.asked)) for a in answers]
    return sum(share * a.tokens for share, a in zip(shares, answers, strict=True)) / (end - began)


def measure(repeats: int, console: Console) -> tuple[list[Point], dict[str, float]]:
    tokenizer = bpe.load(TINY)
    heads = [[SEPARATOR, *tokenizer.encode(head).ids] for head in function_heads(read_corpus().held_out)]
    rates: dict[tuple[tuple[int, str], str], list[float]] = {}
    lengths: dict[tuple[tuple[int, str], str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        servers = {each: running.enter_context(_server(Path(name), each)) for each in SERVERS}
        for repeat in range(-1, repeats):  # the first round warms up, and lets the budget learn the times
            for point in SWING:
                clients, text = point
                prompts = _prompts(REQUESTS * clients, text, heads)
                for each, server in servers.items():
                    with console.status(f"round {repeat + 1} of {repeats}: {point}, {each} ..."):
                        tokens_per_second, length = _load(server.url, clients, prompts)
                    if repeat >= 0:
                        rates.setdefault((point, each), []).append(tokens_per_second)
                        lengths.setdefault((point, each), []).append(length)
    points = []
    for point in SWING:
        by_server = {each: statistics.median(rates[point, each]) for each in SERVERS}
        accepted = {each: statistics.fmean(lengths[point, each]) for each in SERVERS[1:]}
        better = max(by_server["off"], by_server["static"])
        points.append(Point(*point, by_server, accepted, by_server["budget"] / better))
    tokens = sum(point.clients for point in points)
    whole = {
        each: tokens / sum(point.clients / point.tokens_per_second[each] for point in points)
        for each in SERVERS
    }
    return points, whole


def markdown(report: Report) -> str:
    parts = [
        "# The verify budget\n",
        f"Written by `python -m benchmarks.verify_budget`. {machine_line(report.machine)}\n",
        f"tiny-k3 in bf16. Each client asks {REQUESTS} times for {NEW_TOKENS} new tokens; medians of "
        f"{report.repeats} rounds over the points in this order, tokens a second. off: no draft; static: "
        "every drafted row verified; budget: as many as pay. easy: held-out function heads, greedy; hard: "
        "random tokens, temperature 1. It shows one small model on this CPU, whose clients take part of the "
        "two cores, and nothing about an NPU.\n",
        "| clients | text | off | static | budget | budget by the better | tokens a step, static | budget |",
        "| --: | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for point in report.points:
        rates = [f"{point.tokens_per_second[each]:.0f}" for each in SERVERS]
        rest = [point.against_better, *(point.accept_length[each] for each in SERVERS[1:])]
        cells = " | ".join([*rates, *(f"{value:.2f}" for value in rest)])
        parts.append(f"| {point.clients} | {point.text} | {cells} |")
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
