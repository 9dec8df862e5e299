"""What it gains to know where the states are: two workers behind four ways to choose, and one of double size.

    python -m benchmarks.routing [--out DIR] [--repeats 3] [--requests N]

The coding trace (benchmarks/prefix_cache_traces.py), three requests under way at a time, a session's own one
behind the other, against real servers of the tiny model whose state pools are too small for it. Ways: in
turn; by KV blocks, as routers choose that know of no states; by states. Counted are the prompt tokens that
servers say came from their cache. No time is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import requests
from rich.console import Console

from benchmarks import prefix_cache_traces as traces
from benchmarks.machine import describe
from benchmarks.schema import Machine, save
from benchmarks.stages.models import TINY
from benchmarks.text import machine_line
from sglang_k3.prefix_cache.events_subscriber import Subscriber
from sglang_k3.prefix_cache.routing import Chooser, KVChooser
from sglang_k3.testing.server_process import ServerProcess, free_port
from sglang_k3.testing.streams import post
from sglang_k3.training import tokenizer as bpe
from sglang_k3.training.data import read_corpus

PAGE, RUNNING, SLOTS_EACH, CHECKPOINTS = 16, 2, 3, 8
"""Of one worker: a running request has its own slot and two buffers; so many slots remain for the cache."""

AT_ONCE, NEW_TOKENS = 3, 8
DOUBLE, IN_TURN, BY_KV, BY_STATES = "one of double size", "in turn", "by KV", "by states"


class Share(msgspec.Struct, forbid_unknown_fields=True):
    """cached: share of prompt tokens from the cache, of each repeat. foreseen_error: tokens between the hit
    that a choice foresaw and the one that came, mean over its requests; None where nothing is foreseen."""

    cached: list[float]
    foreseen_error: float | None


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """docs/benchmarks/routing.json. by_double: cached tokens with the choice by states by those of one worker
    of double size, over all repeats; over_in_turn, over_kv: by those of the other ways."""

    machine: Machine
    repeats: int
    requests: int
    prompt_tokens: int
    shares: dict[str, Share]
    by_double: float
    over_in_turn: float
    over_kv: float


class Worker:
    """A server that publishes its states. scale: of its pools. sockets: where it publishes and replays, so
    that another can take its place; free ones where left out."""

    def __init__(self, log: Path, scale: int = 1, sockets: tuple[str, str] | None = None) -> None:
        self.sockets = sockets or (f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}")
        events = {"publisher": "states", "bind": True, "token_ids": False}
        events |= {"endpoint": self.sockets[0], "replay_endpoint": self.sockets[1]}
        flags = ("--model-path", str(TINY), "--device", "cpu", "--dtype", "bfloat16")
        flags += ("--page-size", str(PAGE), "--max-running-requests", str(scale * RUNNING))
        flags += ("--max-mamba-cache-size", str(scale * (RUNNING * SLOTS_EACH + CHECKPOINTS)))
        flags += ("--max-total-tokens", str(scale * 65536), "--chunked-prefill-size", "512")
        flags += ("--mamba-track-interval", "64", "--kv-events-config", json.dumps(events))
        self.server = ServerProcess(*flags, log=log)

    def flush(self) -> None:
        requests.post(f"{self.server.url}/flush_cache", timeout=60).raise_for_status()


Way = Callable[[list[int]], tuple[str, int | None]]
"""A prompt's worker, and the hit that is foreseen there."""


@contextmanager
def way(name: str, workers: dict[str, Worker]) -> Iterator[tuple[Way, Callable[[str], None]]]:
    """How to choose, and what to call with the worker's name when a request has ended."""
    if name in (DOUBLE, IN_TURN):
        order = itertools.cycle(workers)
        yield lambda ids: (next(order), None), lambda worker: None
        return
    subscribers = {each: Subscriber(*worker.sockets) for each, worker in workers.items()}
    chooser = (Chooser if name == BY_STATES else KVChooser)(subscribers, PAGE)
    lock = threading.Lock()

    def choose(ids: list[int]) -> tuple[str, int]:
        with lock:
            chooser.refresh(patience_ms=500)
            choice = chooser.choose(ids)
            chooser.started(choice.worker)
            return choice.worker, choice.hit

    def ended(worker: str) -> None:
        with lock:
            chooser.ended(worker)

    try:
        yield choose, ended
    finally:
        for subscriber in subscribers.values():
            subscriber.close()


def play(
    asked: Sequence[traces.Request], workers: dict[str, Worker], name: str, at_once: int = AT_ONCE
) -> tuple[list[int], list[int]]:
    """Tokens cached of each request, and how far what was foreseen lay from that, where something was."""
    for worker in workers.values():
        worker.flush()
    errors: list[int] = []
    before: dict[str, Future[int]] = {}
    with way(name, workers) as (choose, ended), ThreadPoolExecutor(at_once) as pool:

        def ask(request: traces.Request, earlier: Future[int] | None) -> int:
            if earlier is not None:
                earlier.result()
            worker, foreseen = choose(request.prompt)
            sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
            body = {"input_ids": request.prompt, "sampling_params": sampling}
            try:
                cached = post(f"{workers[worker].server.url}/generate", body)["meta_info"]["cached_tokens"]
            finally:
                ended(worker)
            if foreseen is not None:
                errors.append(abs(foreseen - cached))
            return cached

        answers = []
        for request in asked:
            session = request.name.partition(" turn")[0].partition(" branch")[0]
            earlier = None if session == "one-off" else before.get(session)
            before[session] = answer = pool.submit(ask, request, earlier)
            answers.append(answer)
        return [answer.result() for answer in answers], errors


def measure(made: list[traces.Trace], folder: Path, console: Console) -> dict[str, Share]:
    shares: dict[str, Share] = {}
    errors: dict[str, list[int]] = {}
    with ExitStack() as running:
        made_workers = {each: Worker(folder / f"{each}.log") for each in ("a", "b")}
        large = {"double": Worker(folder / "double.log", scale=2)}
        for worker in (*made_workers.values(), *large.values()):
            running.enter_context(worker.server)
        for trace in made:
            for name in (DOUBLE, IN_TURN, BY_KV, BY_STATES):
                with console.status(f"{trace.name}: {name} ..."):
                    workers = large if name == DOUBLE else made_workers
                    cached, foreseen = play(trace.requests, workers, name)
                shares.setdefault(name, Share([], None)).cached.append(sum(cached) / trace.prompt_tokens)
                errors.setdefault(name, []).extend(foreseen)
    for name, share in shares.items():
        share.foreseen_error = statistics.fmean(errors[name]) if errors[name] else None
    return shares


def markdown(report: Report) -> str:
    parts = [
        "# Choosing a worker\n",
        f"Written by `python -m benchmarks.routing`. {machine_line(report.machine)}\n",
        f"The coding trace, {report.repeats} seeds, {report.requests} requests and {report.prompt_tokens:,} "
        f"prompt tokens together; {AT_ONCE} requests under way at a time. Two servers of tiny-k3 with room "
        f"for {CHECKPOINTS} cached states each, and one with twice that. Share of prompt tokens from the "
        "cache:\n",
        "| choice | mean | lowest | highest | tokens off, foreseen and cached |",
        "| --- | --: | --: | --: | --: |",
    ]
    for name, share in report.shares.items():
        error = "" if share.foreseen_error is None else f"{share.foreseen_error:.0f}"
        mean = statistics.fmean(share.cached)
        parts.append(f"| {name} | {mean:.3f} | {min(share.cached):.3f} | {max(share.cached):.3f} | {error} |")
    parts.append(
        f"\nBy states: {report.by_double:.3f} of one worker of double size, {report.over_in_turn:.2f} times "
        f"in turn, {report.over_kv:.2f} times by KV."
    )
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, help="the first so many of each trace: a trial")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    corpus, text = read_corpus(), bpe.load(TINY)
    made = [traces.coding(text, corpus, traces.SEED + number) for number in range(arguments.repeats)]
    made = [msgspec.structs.replace(t, requests=t.requests[: arguments.requests]) for t in made]
    with tempfile.TemporaryDirectory() as name:
        shares = measure(made, Path(name), Console(file=sys.stderr))

    def cached(way: str) -> float:
        return sum(share * t.prompt_tokens for share, t in zip(shares[way].cached, made, strict=True))

    report = Report(
        machine=describe(),
        repeats=arguments.repeats,
        requests=sum(len(trace.requests) for trace in made),
        prompt_tokens=sum(trace.prompt_tokens for trace in made),
        shares=shares,
        by_double=cached(BY_STATES) / cached(DOUBLE),
        over_in_turn=cached(BY_STATES) / cached(IN_TURN),
        over_kv=cached(BY_STATES) / cached(BY_KV),
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    save(report, arguments.out / "routing.json")
    (arguments.out / "routing.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
