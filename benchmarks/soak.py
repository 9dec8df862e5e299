"""Half an hour of mixed sessions on a speculating server with too few state slots: errors, leaks, drift.

    python -m benchmarks.soak [--minutes 30]

Clients hold sessions of up to six turns: each sends its history again with something added, sometimes with
an edit in the middle, greedily or sampled; one request in eight is given up in the middle of its answer. A
fixed prompt is asked again and again; in exact mode its answer must be the first one, token by token.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import requests
from rich.console import Console

from benchmarks.machine import describe
from benchmarks.schema import Machine, save
from benchmarks.stages.models import TINY, TINY_DRAFT
from benchmarks.text import machine_line
from sglang_k3.prefix_cache import view
from sglang_k3.testing import streams
from sglang_k3.testing.server_process import ServerProcess, draft_flags

CLIENTS, TURNS, SLOTS, RUNNING = 6, 6, 24, 4
FLAGS = ("--device", "cpu", "--dtype", "float32", "--enable-deterministic-inference", "--page-size", "16")
FLAGS += ("--max-running-requests", str(RUNNING), "--max-mamba-cache-size", str(SLOTS))
FLAGS += ("--max-total-tokens", "8192", "--mamba-track-interval", "64", "--enable-metrics")
_CANARY = [(7 * i * i + 3) % 1500 for i in range(150)]
_GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


class Third(msgspec.Struct, forbid_unknown_fields=True):
    """Answered requests of one third of the time; milliseconds."""

    requests: int
    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    tpot_p99_ms: float


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """docs/benchmarks/soak.json. errors: what requests answered that were neither answered nor given up.
    wrong_canaries: answers to the fixed prompt that were not the first one. memory_bytes: resident in all of
    the server's processes, once a minute; the first when half a minute had passed."""

    machine: Machine
    minutes: float
    given_up: int
    errors: list[str]
    canaries: int
    wrong_canaries: int
    hit_share: float
    lost_tokens: dict[str, int]
    waits: int
    skips: int
    memory_bytes: list[int]
    emptied: bool
    thirds: list[Third]


class Load:
    """What the clients have seen so far."""

    def __init__(self, url: str, seconds: float) -> None:
        self.url, self.began, self.seconds = url, time.monotonic(), seconds
        self.answers: list[tuple[float, streams.Streamed]] = []
        self.errors: list[str] = []
        self.given_up = self.canaries = self.wrong_canaries = 0
        self.lock = threading.Lock()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def clients(self) -> list[threading.Thread]:
        made = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]
        return [*made, threading.Thread(target=self._canary)]

    def _client(self, number: int) -> None:
        draw = random.Random(number)
        history: Iterator[list[int]] = iter(())
        while self.elapsed < self.seconds:
            ids = next(history, None)
            if ids is None:
                history = _session(draw)
                continue
            sampling = {**_GREEDY, "max_new_tokens": draw.randrange(4, 60)}
            if draw.random() < 0.3:
                sampling["temperature"] = 0.8
            try:
                if draw.random() < 1 / 8:
                    _give_up(self.url, ids, draw.randrange(1, 4))
                    with self.lock:
                        self.given_up += 1
                else:
                    answer = streams.generate_ids(self.url, ids, sampling)
                    with self.lock:
                        self.answers.append((self.elapsed, answer))
            except (streams.RequestFailed, requests.RequestException) as error:
                with self.lock:
                    self.errors.append(str(error)[:300])

    def _canary(self) -> None:
        first: tuple[int, ...] | None = None
        while self.elapsed < self.seconds:
            try:
                ids = streams.generate_ids(self.url, _CANARY, _GREEDY).ids
            except (streams.RequestFailed, requests.RequestException) as error:
                self.errors.append(str(error)[:300])
                time.sleep(2)
                continue
            first = first or ids
            self.canaries += 1
            self.wrong_canaries += ids != first
            time.sleep(2)

    def thirds(self) -> list[Third]:
        made = []
        for part in range(3):
            low, high = part * self.seconds / 3, (part + 1) * self.seconds / 3
            found = [answer for when, answer in self.answers if low <= when < high]
            ttft, tpot = ([1e3 * getattr(a, name) for a in found] for name in ("ttft_s", "tpot_s"))
            made.append(Third(len(found), _middle(ttft), _p99(ttft), _middle(tpot), _p99(tpot)))
        return made


def _middle(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98] if len(values) > 1 else 0.0


def _session(draw: random.Random) -> Iterator[list[int]]:
    """Prompts of its turns. What stands for an answer is drawn too: an abandoned one has none."""
    shared = random.Random(draw.randrange(3))
    ids = [shared.randrange(1500) for _ in range(60)]
    for _ in range(draw.randrange(1, TURNS + 1)):
        if len(ids) > 100 and draw.random() < 0.3:
            ids[draw.randrange(len(ids))] = draw.randrange(1500)
        ids = [*ids, *(draw.randrange(1500) for _ in range(draw.randrange(1, 90)))]
        yield ids


def _give_up(url: str, ids: list[int], events: int) -> None:
    """Close the stream behind so many events; the server aborts the request."""
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": {**_GREEDY, "max_new_tokens": 200}}
    with requests.post(f"{url}/generate", json={**body, "stream": True}, stream=True, timeout=300) as answer:
        answer.raise_for_status()
        for _, line in zip(range(2 * events), answer.iter_lines(), strict=False):
            if not line:
                continue


def _emptied(url: str) -> bool:
    """Whether the cache can be flushed within ten seconds: then no request holds anything any more."""
    for _ in range(20):
        if requests.post(f"{url}/flush_cache", timeout=60).status_code == 200:
            return True
        time.sleep(0.5)
    return False


def soak(minutes: float, console: Console) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with ServerProcess("--model-path", str(TINY), *FLAGS, *draft_flags(TINY_DRAFT), log=log) as server:
            load = Load(server.url, 60 * minutes)
            threads = load.clients()
            for thread in threads:
                thread.start()
            memory, look = [], min(30.0, 10 * minutes)
            with console.status("under load ...") as status:
                while any(thread.is_alive() for thread in threads):
                    time.sleep(min(5.0, load.seconds / 10))
                    if load.elapsed >= look:
                        memory.append(server.resident_bytes())
                        look += min(60.0, 20 * minutes)
                    status.update(f"{load.elapsed / 60:.1f} min, {len(load.answers)} answers")
            emptied = _emptied(server.url)
            shown = view.read(view.fetch(server.url))
    return Report(
        machine=describe(),
        minutes=minutes,
        given_up=load.given_up,
        errors=load.errors,
        canaries=load.canaries,
        wrong_canaries=load.wrong_canaries,
        hit_share=shown.hit_share,
        lost_tokens=shown.lost_tokens,
        waits=shown.waits,
        skips=shown.skips,
        memory_bytes=memory,
        emptied=emptied,
        thirds=load.thirds(),
    )


def markdown(report: Report) -> str:
    rows = "\n".join(
        f"| {number} | {t.requests} | {t.ttft_ms:.0f} / {t.ttft_p99_ms:.0f} "
        f"| {t.tpot_ms:.1f} / {t.tpot_p99_ms:.1f} |"
        for number, t in enumerate(report.thirds, 1)
    )
    lost = ", ".join(f"{tokens} {reason.replace('_', ' ')}" for reason, tokens in report.lost_tokens.items())
    memory = [size / 2**20 for size in report.memory_bytes]
    return f"""\
# Soak

{(__doc__ or "").partition("[--minutes 30]")[2].strip()}

Written by `python -m benchmarks.soak`. {machine_line(report.machine)} {report.minutes:g} minutes, {CLIENTS}
clients, at most {RUNNING} requests at once, {SLOTS} state slots, tiny-k3 with its draft, exact mode. It shows
whether anything breaks or grows; its times are a tiny model's.

| third of the time | answers | TTFT ms, median / p99 | TPOT ms, median / p99 |
| --: | --: | --: | --: |
{rows}

- Errors: {len(report.errors)}. Requests given up by their client: {report.given_up}.
- The fixed prompt was asked {report.canaries} times; {report.wrong_canaries} answers differed.
- Prompt tokens from the cache: {report.hit_share:.0%}. Lost for want of a state: {lost}.
- Requests found no slot to start with {report.waits} times; {report.skips} states were not kept for want
  of one.
- Resident memory: {memory[0]:.0f} MiB at first, {max(memory):.0f} at most, {memory[-1]:.0f} at the end.
- Behind the last answer the cache could {"" if report.emptied else "NOT "}be emptied.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    report = soak(arguments.minutes, Console(file=sys.stderr))
    arguments.out.mkdir(parents=True, exist_ok=True)
    save(report, arguments.out / "soak.json")
    (arguments.out / "soak.md").write_text(markdown(report))
    print(markdown(report))
    if report.errors or report.wrong_canaries or not report.canaries or not report.emptied:
        sys.exit(1)


if __name__ == "__main__":
    main()
