"""What it costs to tell the outside of states: a server with state events beside one without, asked in turn.

    python -m benchmarks.state_events [--minutes 10] [--out DIR]

Both serve the tiny model with too few state slots, so that every turn stores and evicts states. A round asks
both for the same turn of two sessions, which of them first by turns; a figure is the ratio of the two times a
token of one round, and the median over the rounds. A follower takes in all events and is killed and started
again every minute; another subscriber never reads. Resident memory is noted once a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import zmq
from rich.console import Console

from benchmarks.machine import describe
from benchmarks.schema import Machine, save
from benchmarks.stages.models import TINY
from benchmarks.text import machine_line
from sglang_k3.prefix_cache.events_subscriber import Subscriber
from sglang_k3.testing import streams
from sglang_k3.testing.server_process import ServerProcess, free_port

SESSIONS, TURNS, NEW_TOKENS = 2, 5, 64
FLAGS = ("--model-path", str(TINY), "--device", "cpu", "--dtype", "bfloat16", "--page-size", "16")
FLAGS += ("--max-running-requests", str(SESSIONS), "--max-mamba-cache-size", "18")
FLAGS += ("--max-total-tokens", "8192", "--mamba-track-interval", "64", "--chunked-prefill-size", "512")
_FOLLOWER = """
import sys
from sglang_k3.prefix_cache.events_subscriber import Subscriber
with Subscriber(*sys.argv[1:]) as worker:
    while True:
        worker.poll(100)
"""


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """docs/benchmarks/state_events.json. tpot_ms: medians over the rounds, without events and with. ratio:
    median of a round's time a token with events by that without; ratio_low, ratio_high: a 95 % interval of
    that median. batches, states_stored: published while it was measured. memory_bytes: resident in all
    processes of the server with events, once a minute; memory_bytes_without: of the other. same_holdings:
    whether a follower that came at the end found the states that one held which had followed throughout."""

    machine: Machine
    minutes: float
    rounds: int
    tpot_ms: tuple[float, float]
    ratio: float
    ratio_low: float
    ratio_high: float
    batches: int
    states_stored: int
    follower_restarts: int
    memory_bytes: list[int]
    memory_bytes_without: list[int]
    same_holdings: bool


class Events:
    """The sockets of a server's events, and what listens there."""

    def __init__(self) -> None:
        self.sockets = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
        self.restarts = -1
        self._follower: subprocess.Popen | None = None
        self._deaf = zmq.Context.instance().socket(zmq.SUB)
        self._deaf.set_hwm(1)
        self._deaf.setsockopt_string(zmq.SUBSCRIBE, "")
        self._deaf.connect(self.sockets[0])

    @property
    def flags(self) -> tuple[str, str]:
        config = {"publisher": "states", "bind": True, "endpoint": self.sockets[0]}
        return "--kv-events-config", json.dumps({**config, "replay_endpoint": self.sockets[1]})

    def follow_anew(self) -> None:
        self.stop()
        self._follower = subprocess.Popen([sys.executable, "-c", _FOLLOWER, *self.sockets])
        self.restarts += 1

    def stop(self) -> None:
        if self._follower is not None:
            self._follower.kill()
            self._follower.wait()
            self._follower = None

    def close(self) -> None:
        self.stop()
        self._deaf.close(linger=0)


def turns(seed: int) -> list[list[list[int]]]:
    """[TURNS][SESSIONS] prompts: each goes on from the one before it, now and then with an edit."""
    draw = random.Random(seed)
    histories = [[draw.randrange(1500) for _ in range(draw.randrange(150, 400))] for _ in range(SESSIONS)]
    made = []
    for _ in range(TURNS):
        for ids in histories:
            if draw.random() < 0.25:
                ids[draw.randrange(len(ids))] = draw.randrange(1500)
            ids += [draw.randrange(1500) for _ in range(draw.randrange(40, 120))]
        made.append([list(ids) for ids in histories])
    return made


def tpot(url: str, prompts: list[list[int]], pool: ThreadPoolExecutor) -> float:
    """Milliseconds a token, mean of the sessions."""
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    answers = pool.map(lambda ids: streams.generate_ids(url, ids, sampling), prompts)
    return 1e3 * statistics.fmean(answer.tpot_s for answer in answers)


def interval(values: list[float]) -> tuple[float, float]:
    """95 % of the median, by the ranks of the sorted values (binomial, normal approximation)."""
    ordered, count = sorted(values), len(values)
    half = 0.98 * count**0.5
    low, high = int(count / 2 - half), int(count / 2 + half)
    return ordered[max(0, low)], ordered[min(count - 1, high)]


def measure(minutes: float, console: Console) -> Report:
    described = describe()
    without, beside = [], []
    memory: tuple[list[int], list[int]] = [], []
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        events = Events()
        running.callback(events.close)
        plain = ServerProcess(*FLAGS, log=Path(name) / "plain.log")
        telling = ServerProcess(*FLAGS, *events.flags, log=Path(name) / "events.log")
        servers = [running.enter_context(server) for server in (plain, telling)]
        throughout = running.enter_context(Subscriber(*events.sockets))
        pool = running.enter_context(ThreadPoolExecutor(SESSIONS))
        stored, seen = 0, set[int]()
        began, minute, seed = time.monotonic(), 0, 0
        with console.status("rounds ..."):
            while (elapsed := time.monotonic() - began) < 60 * minutes:
                if elapsed >= 60 * minute:
                    minute += 1
                    events.follow_anew()
                    for each, server in zip(memory, servers, strict=True):
                        each.append(server.resident_bytes())
                seed += 1
                for number, prompts in enumerate(turns(seed)):
                    order = (0, 1) if (seed + number) % 2 else (1, 0)
                    times = {which: tpot(servers[which].url, prompts, pool) for which in order}
                    throughout.poll(0)
                    stored += len(throughout.holdings.states.keys() - seen)
                    seen = set(throughout.holdings.states)
                    if seed > 2:  # the first prompts prepare kernels
                        without.append(times[0])
                        beside.append(times[1])
        time.sleep(1.0)
        throughout.poll(100)
        with Subscriber(*events.sockets) as late:
            same = late.catch_up() and throughout.catch_up()
            same = same and late.holdings.states.keys() == throughout.holdings.states.keys()
    ratios = [b / a for a, b in zip(without, beside, strict=True)]
    low, high = interval(ratios)
    return Report(
        machine=described,
        minutes=minutes,
        rounds=len(ratios),
        tpot_ms=(statistics.median(without), statistics.median(beside)),
        ratio=statistics.median(ratios),
        ratio_low=low,
        ratio_high=high,
        batches=throughout.batches,
        states_stored=stored,
        follower_restarts=events.restarts,
        memory_bytes=memory[1],
        memory_bytes_without=memory[0],
        same_holdings=bool(same),
    )


def markdown(report: Report) -> str:
    plain, telling = report.tpot_ms
    with_events, without = (
        f"{each[0] / 2**20:.0f}, then {', '.join(f'{value / 2**20:.0f}' for value in each[1:])} MiB"
        for each in (report.memory_bytes, report.memory_bytes_without)
    )
    return (
        "# State events: what they cost\n\n"
        f"Written by `python -m benchmarks.state_events`. {machine_line(report.machine)}\n\n"
        f"{report.minutes:.0f} minutes, {report.rounds} rounds of {SESSIONS} sessions' turns asked of both; "
        f"{report.batches} batches of events, {report.states_stored} states stored, the follower killed and "
        f"started again {report.follower_restarts} times, a subscriber that reads nothing beside it.\n\n"
        "| | |\n| --- | --: |\n"
        f"| ms a token without events | {plain:.2f} |\n"
        f"| ms a token with events | {telling:.2f} |\n"
        f"| ratio, median of the rounds | {report.ratio:.4f} |\n"
        f"| its 95 % interval | {report.ratio_low:.4f} to {report.ratio_high:.4f} |\n"
        f"| a late follower held what the first one did | {'yes' if report.same_holdings else 'NO'} |\n\n"
        f"Resident memory once a minute, with events: {with_events}; without: {without}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    report = measure(arguments.minutes, Console(file=sys.stderr))
    arguments.out.mkdir(parents=True, exist_ok=True)
    save(report, arguments.out / "state_events.json")
    (arguments.out / "state_events.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
