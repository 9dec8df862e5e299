"""Whether the verify budget is right to speculate: three servers under a load that swings.

    python -m benchmarks.verify_budget [--model tiny | experts] [--out DIR] [--repeats 3] [--requests 4]
        [--new-tokens 96]

A trained target without a draft, with one and every row verified, and with the budget
(SGLANG_RAGGED_VERIFY_MODE=compact); 1 to 16 clients, of text that the draft knows and text that it
does not. Each point is asked of all three in turn. Then no draft is right for a minute, and all are again.

tiny is examples/tiny-k3, whose weights a cache holds; experts has 128 of them, larger than this machine's
cache (benchmarks/many_experts.py), and the same draft.
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
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from safetensors.torch import load_file
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from benchmarks import many_experts
from benchmarks.machine import describe, l3_bytes
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
FORCED_CLIENTS, FORCED_SECONDS = 4, 60.0


class Point(msgspec.Struct, forbid_unknown_fields=True):
    """Tokens a second by server, median of the repeats; accept_length: tokens a verify step and request, of
    the servers with a draft. against_better: the budget's rate by that of the better of the other two."""

    clients: int
    text: str
    tokens_per_second: dict[str, float]
    accept_length: dict[str, float]
    against_better: float


class Forced(msgspec.Struct, forbid_unknown_fields=True):
    """Clients whose drafts are all wrong for `seconds`, then as good as ever for the last part.

    tokens_per_second: by server, while drafts are wrong. accept_length, paused: the budget's tokens a verify
    step, and share of steps without a draft, of requests asked in the second half of that time. after: the
    same two of requests asked behind it, and how long behind it the first one was answered whose drafts were
    computed in more than half its steps.
    """

    clients: int
    seconds: float
    tokens_per_second: dict[str, float]
    accept_length: float
    paused: float
    accept_length_after: float
    paused_after: float
    resumed_after_seconds: float | None


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """docs/benchmarks/verify_budget-MODEL.json. whole: tokens a second over all points, each counted once.
    expert_bytes: of all routed experts, as stored. requests: of each client at each point."""

    machine: Machine
    model: str
    expert_bytes: int
    repeats: int
    requests: int
    new_tokens: int
    points: list[Point]
    whole: dict[str, float]
    forced: Forced


class Unforeseen(CustomLogitProcessor):
    """Every token becomes the next one of the vocabulary, which a draft cannot know."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        return logits.roll(1, -1)


def _server(folder: Path, target: Path, name: str) -> ServerProcess:
    flags = ("--model-path", str(target), "--device", "cpu", "--dtype", "bfloat16", "--page-size", "16")
    flags += ("--max-running-requests", "16", "--max-mamba-cache-size", "96", "--max-total-tokens", "32768")
    flags += ("--disable-radix-cache", "--enable-custom-logit-processor")
    draft = () if name == "off" else draft_flags(TINY_DRAFT)
    env = {VARIABLE: "compact"} if name == "budget" else {}
    return ServerProcess(*flags, *draft, log=folder / f"{name}.log", env=env)


Prompt = tuple[list[int], dict[str, float]]
"""Token ids, and how to sample."""


class Size(NamedTuple):
    """requests: of each client at each point; new_tokens: of each. repeats: rounds behind the one that warms
    up. forced_seconds: how long drafts are forced to be wrong."""

    repeats: int
    requests: int
    new_tokens: int
    forced_seconds: float


def _prompts(count: int, text: str, heads: list[list[int]]) -> list[Prompt]:
    if text == "easy":
        return [(heads[i % len(heads)], {"temperature": 0.0}) for i in range(count)]
    draw = random.Random(count)
    return [([draw.randrange(2000) for _ in range(40)], {"temperature": 1.0}) for _ in range(count)]


class Answer(NamedTuple):
    """One request: when it was asked and answered, in seconds; tokens; verify steps of a draft's server, and
    those among them that a budget left without a draft."""

    asked: float
    answered: float
    tokens: int
    steps: int
    paused: int = 0


def _ask(url: str, prompt: Prompt, new_tokens: int, *, unforeseen: bool = False) -> Answer:
    ids, sampling = prompt
    asked = time.perf_counter()
    options = {"max_new_tokens": new_tokens, "ignore_eos": True, **sampling}
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": options}
    if unforeseen:
        body["custom_logit_processor"] = Unforeseen.to_str()
    meta = post(f"{url}/generate", body)["meta_info"]
    paused = meta["verify_budget"][0]["paused_steps"] if meta.get("verify_budget") else 0
    steps = meta.get("spec_verify_ct") or 0
    return Answer(asked, time.perf_counter(), meta["completion_tokens"], steps, paused)


def _load(url: str, clients: int, prompts: list[Prompt], new_tokens: int) -> tuple[float, float]:
    """(tokens a second, tokens a verify step) while each client has a request under way."""
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda prompt: _ask(url, prompt, new_tokens), prompts))
    return rate(answers), _accept_length(answers)


def rate(answers: list[Answer]) -> float:
    """Tokens a second until the last request was asked. Behind it clients run dry, and the slowest request
    alone would be timed; of those under way then the part before counts."""
    began, end = min(a.asked for a in answers), max(a.asked for a in answers)
    shares = [min(1.0, (end - a.asked) / (a.answered - a.asked)) for a in answers]
    return sum(share * a.tokens for share, a in zip(shares, answers, strict=True)) / (end - began)


def _forced(servers: dict[str, ServerProcess], heads: list[list[int]], size: Size) -> Forced:
    """Easy text, of which no draft is right until the time is over."""
    seconds = size.forced_seconds
    rates = {}
    for name, server in servers.items():
        began = time.perf_counter()
        ends = began + seconds + (seconds / 2 if name == "budget" else 0)
        answers: list[tuple[Answer, bool]] = []

        def client(number: int, server=server, began=began, ends=ends, answers=answers) -> None:
            asked = 0
            while time.perf_counter() < ends:
                prompt = heads[(number + asked * FORCED_CLIENTS) % len(heads)]
                wrong = time.perf_counter() < began + seconds
                answers.append(
                    (
                        _ask(server.url, (prompt, {"temperature": 0.0}), size.new_tokens, unforeseen=wrong),
                        wrong,
                    )
                )
                asked += 1

        with ThreadPoolExecutor(FORCED_CLIENTS) as pool:
            list(pool.map(client, range(FORCED_CLIENTS)))
        rates[name] = rate([answer for answer, wrong in answers if wrong])
    late = [answer for answer, wrong in answers if wrong and answer.asked > began + seconds / 2]
    after = [answer for answer, wrong in answers if not wrong]
    resumed = [answer.answered - began - seconds for answer in after if 2 * answer.paused < answer.steps]
    return Forced(
        FORCED_CLIENTS,
        seconds,
        rates,
        _accept_length(late),
        _paused(late),
        _accept_length(after),
        _paused(after),
        min(resumed, default=None),
    )


def _accept_length(answers: list[Answer]) -> float:
    return sum(a.tokens - 1 for a in answers) / max(1, sum(a.steps for a in answers))


def _paused(answers: list[Answer]) -> float:
    return sum(a.paused for a in answers) / max(1, sum(a.steps for a in answers))


def measure(target: Path, size: Size, console: Console) -> tuple[list[Point], dict[str, float], Forced]:
    """target: the checkpoint's folder."""
    tokenizer = bpe.load(TINY)
    heads = [[SEPARATOR, *tokenizer.encode(head).ids] for head in function_heads(read_corpus().held_out)]
    rates: dict[tuple[tuple[int, str], str], list[float]] = {}
    lengths: dict[tuple[tuple[int, str], str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        servers = {each: running.enter_context(_server(Path(name), target, each)) for each in SERVERS}
        for repeat in range(
            -1, size.repeats
        ):  # the first round warms up, and lets the budget learn the times
            for point in SWING:
                clients, text = point
                prompts = _prompts(size.requests * clients, text, heads)
                for each, server in servers.items():
                    with console.status(f"round {repeat + 1} of {size.repeats}: {point}, {each} ..."):
                        tokens_per_second, length = _load(server.url, clients, prompts, size.new_tokens)
                    if repeat >= 0:
                        rates.setdefault((point, each), []).append(tokens_per_second)
                        lengths.setdefault((point, each), []).append(length)
        with console.status(f"drafts that are wrong for {size.forced_seconds:.0f} s ..."):
            forced = _forced(servers, heads, size)
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
    return points, whole, forced


def markdown(report: Report) -> str:
    parts = [
        "# The verify budget\n",
        f"Written by `python -m benchmarks.verify_budget --model {report.model}`. "
        f"{machine_line(report.machine)}\n",
        f"{_what(report)} in bf16. Each client asks {report.requests} times for {report.new_tokens} new "
        f"tokens; medians of {report.repeats} rounds over the points in this order, tokens a second. off: no "
        "draft; static: every drafted row verified; budget: as many as pay. easy: held-out function heads, "
        "greedy; hard: random tokens, temperature 1. It shows one small model on this CPU, whose clients "
        "take part of its cores, and nothing about an NPU.\n",
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
    parts += ["", _forced_text(report.forced)]
    return "\n".join(parts) + "\n"


def _what(report: Report) -> str:
    megabytes = f"{report.expert_bytes / 1e6:.0f} MB"
    if report.model == "tiny":
        return f"tiny-k3 ({megabytes} of routed experts, which a cache holds)"
    cache = f"{(report.machine.l3_bytes or 0) / 1e6:.0f} MB"
    return f"tiny-k3 with 128 experts of which 8 are chosen ({megabytes} of them, and {cache} of cache)"


def _forced_text(forced: Forced) -> str:
    rates = ", ".join(f"{each} {forced.tokens_per_second[each]:.0f}" for each in SERVERS)
    resumed = forced.resumed_after_seconds
    return (
        f"Drafts that are all wrong for {forced.seconds:.0f} s, {forced.clients} clients: {rates} tokens a "
        f"second; in the second half of that time the budget left {forced.paused:.0%} of the steps without a "
        f"draft ({forced.accept_length:.2f} tokens a step). Behind it {forced.paused_after:.0%} "
        f"({forced.accept_length_after:.2f} tokens a step); "
        + (
            "no answer there was drafted in more than half of its steps."
            if resumed is None
            else f"the first answer drafted in more than half of its steps came {resumed:.1f} s behind it."
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=("tiny", "experts"), default="tiny")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4, help="of each client at each point")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--forced-seconds", type=float, default=FORCED_SECONDS)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with tempfile.TemporaryDirectory() as name:
        if arguments.model == "experts":
            target = Path(name)
            stored = many_experts.widen(TINY, target, many_experts.width_beyond(l3_bytes()))
        else:
            target, stored = TINY, many_experts.expert_bytes(load_file(TINY / "model.safetensors"))
        size = Size(arguments.repeats, arguments.requests, arguments.new_tokens, arguments.forced_seconds)
        measured = measure(target, size, Console(file=sys.stderr))
    report = Report(describe(), arguments.model, stored, *size[:3], *measured)
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = f"verify_budget-{report.model}"
    save(report, arguments.out / f"{stem}.json")
    (arguments.out / f"{stem}.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
