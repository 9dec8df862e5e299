"""Two real servers, chosen between by their state events."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from benchmarks import prefix_cache_traces as traces
from benchmarks.routing import BY_STATES, IN_TURN, NEW_TOKENS, PAGE, Worker, play
from sglang_k3.prefix_cache.events_subscriber import Subscriber
from sglang_k3.prefix_cache.router_target import RouterWorkers
from sglang_k3.prefix_cache.routing import Chooser
from sglang_k3.prefix_cache.routing_service import Service
from sglang_k3.testing.router_process import RouterProcess
from sglang_k3.testing.streams import post
from sglang_k3.training import tokenizer as bpe
from sglang_k3.training.data import read_corpus
from tests.server.conftest import TINY

pytestmark = pytest.mark.verify


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    logs = tmp_path_factory.mktemp("workers")
    made = {name: Worker(logs / f"{name}.log") for name in ("a", "b")}
    try:
        for worker in made.values():
            worker.server.wait()
        yield made
    finally:
        for worker in made.values():
            worker.server.close()


def test_one_request_at_a_time_every_hit_is_foreseen(workers: dict[str, Worker]) -> None:
    """And more comes from the caches than where workers take turns."""
    asked = traces.coding(bpe.load(TINY), read_corpus()).requests[:30]
    by_states, errors = play(asked, workers, BY_STATES, at_once=1)
    assert errors == [0] * len(asked)
    in_turn, _ = play(asked, workers, IN_TURN, at_once=1)
    assert sum(by_states) > 1.1 * sum(in_turn) > 0


def test_a_router_in_front_sends_each_request_where_its_state_is(
    workers: dict[str, Worker], tmp_path: Path
) -> None:
    """The service chooses, a real smg sends, and what was foreseen is what the server says was cached."""
    for worker in workers.values():
        worker.flush()
    subscribers = {worker.server.url: Subscriber(*worker.sockets) for worker in workers.values()}
    with RouterProcess(list(subscribers), tmp_path / "router.log") as router:
        chooser = Chooser(subscribers, PAGE)
        service = Service(chooser, port=0, router=RouterWorkers(router.url))
        threading.Thread(target=service.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{service.server_address[1]}"
        sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
        reached, hits, before = set(), 0, ""
        try:
            for request in traces.coding(bpe.load(TINY), read_corpus()).requests[:24]:
                # What the last answer stored has been told.
                time.sleep(0.3)
                with service.lock:
                    chooser.refresh(patience_ms=5000)
                choice = requests.post(f"{url}/choose", json={"input_ids": request.prompt}, timeout=60).json()
                assert choice["headers"], "the router has not told its workers"
                answer = requests.post(
                    f"{router.url}/generate",
                    json={"input_ids": request.prompt, "sampling_params": sampling},
                    headers=choice["headers"],
                    timeout=600,
                )
                answer.raise_for_status()
                assert answer.headers["X-SMG-Routed-Worker-Id"] == choice["worker"]
                assert answer.json()["meta_info"]["cached_tokens"] == choice["hit"]
                # One is told to have ended behind the next one's choice, which goes elsewhere where nothing
                # is to be restored.
                if before:
                    ended = requests.post(f"{url}/ended", json={"worker": before}, timeout=60)
                    ended.raise_for_status()
                before = choice["worker"]
                reached.add(choice["worker"])
                hits += choice["hit"] > 0
        finally:
            service.shutdown()
            service.server_close()
            with service.lock:
                for subscriber in subscribers.values():
                    subscriber.close()
    assert reached == set(subscribers) and hits >= 10


def ask(worker: Worker, ids: list[int]) -> int:
    """Tokens of the prompt that were cached."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2, "temperature": 0.0}}
    return post(f"{worker.server.url}/generate", body)["meta_info"]["cached_tokens"]


def followed(chooser: Chooser, ids: list[int], worker: str, hit: int) -> bool:
    """Whether the chooser comes to expect that hit of that worker."""
    for _ in range(150):
        chooser.refresh()
        choice = chooser.choose(ids)
        if (choice.worker, choice.hit) == (worker, hit):
            return True
        time.sleep(0.1)
    return False


def test_a_killed_worker_that_comes_again_is_followed(workers: dict[str, Worker], tmp_path: Path) -> None:
    """Neither the follower nor the other worker is started anew."""
    # A prompt's first state stands at the last page that ends 32 tokens before it (docs/prefix_cache.md).
    first, second, third = ([start + i for i in range(203)] for start in (7, 400, 900))
    for worker in workers.values():
        worker.flush()
    subscribers = {name: Subscriber(*worker.sockets, timeout_ms=1000) for name, worker in workers.items()}
    # A worker's first batch can come before the follower is connected again; one that says nothing is asked
    # when half of stale_s has passed.
    chooser = Chooser(subscribers, PAGE, stale_s=10.0)
    try:
        assert (ask(workers["a"], first), ask(workers["b"], second)) == (0, 0)
        assert followed(chooser, first, "a", 160) and followed(chooser, second, "b", 160)
        workers["a"].server.kill()
        assert followed(chooser, second, "b", 160), "the other one is followed as before"
        workers["a"] = Worker(tmp_path / "again.log", sockets=workers["a"].sockets)
        workers["a"].server.wait()
        assert ask(workers["a"], third) == 0
        assert followed(chooser, third, "a", 160)
        assert (subscribers["a"].restarts, subscribers["b"].restarts) == (1, 0)
        assert chooser.choose(first).hit == 0, "what the killed one held is forgotten"
        assert ask(workers["a"], first) == 0, "and a new process has nothing of it"
        assert ask(workers["b"], second) == 160
    finally:
        for subscriber in subscribers.values():
            subscriber.close()
