"""The choice between workers, over real event sockets."""

from __future__ import annotations

import random
import threading
import time
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str, hash_str_to_int64

from sglang_k3.prefix_cache.events_publisher import SnapshotPublisher
from sglang_k3.prefix_cache.events_subscriber import Subscriber
from sglang_k3.prefix_cache.routing import Chooser, KVChooser, block_hashes
from sglang_k3.prefix_cache.routing_service import Service
from sglang_k3.testing.server_process import free_port
from tests.prefix_cache.test_events import gone, heard, kv, publish, state

PAGE = 16


@pytest.fixture
def workers() -> Iterator[Any]:
    """Two publishers and a subscriber to each, by name."""
    made, publishers = {}, {}
    for name in ("a", "b"):
        ports = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
        publishers[name] = SnapshotPublisher(0, endpoint=ports[0], replay_endpoint=ports[1], bind=True)
        made[name] = Subscriber(*ports, timeout_ms=500)
    yield SimpleNamespace(subscribers=made, publishers=publishers)
    for name in made:
        made[name].close()
        publishers[name].shutdown()


def told(workers: Any, name: str, *batches: list[Any]) -> None:
    publish(workers.publishers[name], *batches)
    for subscriber in workers.subscribers.values():
        heard(subscriber)


def prompt(pages: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(150_000) for _ in range(pages * PAGE + 1)]


def test_hashes_are_those_of_sglangs_events() -> None:
    ids = prompt(6)
    key = RadixKey(array("q", ids[: 6 * PAGE]), None)
    assert block_hashes(ids, PAGE) == [
        hash_str_to_int64(one) for one in get_storage_hash_str(key, None, page_size=PAGE)
    ]
    assert len(block_hashes(ids[: 6 * PAGE], PAGE)) == 5, "a prompt's last token is computed"


def test_the_deepest_state_wins_over_deeper_kv(workers) -> None:
    """Worker a has all the KV and a state at the second page; b has less KV and a state at the third."""
    ids = prompt(6)
    blocks = block_hashes(ids, PAGE)
    told(workers, "a", [kv(*blocks), state(blocks[1], 32)])
    told(workers, "b", [kv(*blocks[:4]), state(blocks[2], 48)])
    chooser, by_kv = Chooser(workers.subscribers, PAGE), KVChooser(workers.subscribers, PAGE)
    choice = chooser.choose(ids)
    assert (choice.worker, choice.hit, choice.by_load) == ("b", 48, False)
    assert by_kv.choose(ids).worker == "a"
    told(workers, "b", [gone(blocks[2], "mamba")])
    assert (chooser.choose(ids).worker, chooser.choose(ids).hit) == ("a", 32)
    assert chooser.counts.by_hit == 3


def test_kv_without_a_state_pulls_a_little(workers) -> None:
    """It saves nothing, so nothing is expected of it; a request under way weighs more."""
    ids = prompt(6)
    blocks = block_hashes(ids, PAGE)
    told(workers, "b", [kv(*blocks)])
    chooser = Chooser(workers.subscribers, PAGE, load_tokens=40, kv_share=0.25)
    choice = chooser.choose(ids)
    assert (choice.worker, choice.hit, choice.by_load) == ("b", 0, False)
    chooser.started("b")
    assert chooser.choose(ids).worker == "a"
    assert Chooser(workers.subscribers, PAGE, kv_share=0.0).choose(ids).worker == "a"
    told(workers, "a", [kv(*blocks[:2]), state(blocks[1], 32)])
    assert Chooser(workers.subscribers, PAGE).choose(ids).hit == 32


def test_load_outweighs_a_small_hit_and_not_a_large_one(workers) -> None:
    ids = prompt(6)
    blocks = block_hashes(ids, PAGE)
    told(workers, "a", [kv(*blocks), state(blocks[5], 96)])
    chooser = Chooser(workers.subscribers, PAGE, load_tokens=40)
    assert chooser.choose(ids).worker == "a"
    for _ in range(2):
        chooser.started("a")
    assert chooser.choose(ids).worker == "a"
    chooser.started("a")
    assert chooser.choose(ids).worker == "b"
    chooser.ended("a")
    assert chooser.choose(ids).worker == "a"


def test_what_nobody_holds_goes_by_load_and_is_counted(workers) -> None:
    told(workers, "a", [kv(1), state(1, 16)])
    chooser = Chooser(workers.subscribers, PAGE)
    chooser.started("a")
    choice = chooser.choose(prompt(3, seed=2))
    assert (choice.worker, choice.hit, choice.by_load) == ("b", 0, True)
    assert (chooser.counts.by_hit, chooser.counts.by_load, chooser.counts.stale) == (0, 1, 0)


def test_a_worker_not_heard_of_is_taken_to_hold_nothing(workers) -> None:
    ids = prompt(4)
    blocks = block_hashes(ids, PAGE)
    told(workers, "a", [kv(*blocks), state(blocks[3], 64)])
    chooser = Chooser(workers.subscribers, PAGE, stale_s=30.0)
    assert chooser.choose(ids).hit == 64
    for subscriber in workers.subscribers.values():
        subscriber.heard = time.monotonic() - 31
    choice = chooser.choose(ids)
    assert (choice.hit, choice.by_load, chooser.counts.stale) == (0, True, 1)
    chooser.refresh(patience_ms=2000)
    assert chooser.choose(ids).hit == 64, "it was asked, and answered"


def test_a_dead_worker_holds_nobody_up(workers) -> None:
    """Its questions stay open beside the choices; what the other one says is taken in meanwhile."""
    ids = prompt(4)
    blocks = block_hashes(ids, PAGE)
    told(workers, "a", [kv(*blocks), state(blocks[3], 64)])
    chooser = Chooser(workers.subscribers, PAGE, stale_s=0.4)
    workers.publishers["a"].shutdown()
    time.sleep(0.5)
    chooser.refresh()
    assert workers.subscribers["a"].asking, "it came back with the question open"
    assert chooser.choose(ids).hit == 0
    publish(workers.publishers["b"], [kv(*blocks), state(blocks[1], 32)])
    for _ in range(200):
        chooser.refresh()
        if chooser.choose(ids).hit:
            break
        time.sleep(0.01)
    assert (chooser.choose(ids).worker, chooser.choose(ids).hit) == ("b", 32)


def test_a_worker_with_more_blocks_than_are_remembered_is_taken_to_hold_nothing(workers) -> None:
    ids = prompt(4)
    blocks = block_hashes(ids, PAGE)
    told(workers, "a", [kv(*blocks), state(blocks[3], 64)])
    assert Chooser(workers.subscribers, PAGE, most_blocks=3).choose(ids).hit == 0


def test_the_service_answers_what_the_chooser_says(workers) -> None:
    ids = prompt(6)
    blocks = block_hashes(ids, PAGE)
    publish(workers.publishers["b"], [kv(*blocks), state(blocks[3], 64)])
    service = Service(Chooser(workers.subscribers, PAGE, load_tokens=40), port=0)
    threading.Thread(target=service.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{service.server_address[1]}"

    def post(path: str, body: Any) -> requests.Response:
        return requests.post(url + path, json=body, timeout=20)

    try:
        for _ in range(200):
            with service.lock:
                if workers.subscribers["b"].holdings.states and workers.subscribers["a"].synced:
                    break
            time.sleep(0.05)
        first = post("/choose", {"input_ids": ids})
        assert (first.status_code, first.json()) == (
            200,
            {"worker": "b", "hit": 64, "by_load": False, "headers": {}},
        )
        # Two under way at b weigh more than what it holds.
        assert post("/choose", {"input_ids": ids}).json()["worker"] == "b"
        assert post("/choose", {"input_ids": ids}).json()["worker"] == "a"
        assert post("/ended", {"worker": "b"}).status_code == 200
        assert post("/choose", {"input_ids": ids}).json()["worker"] == "b"
        assert requests.get(url + "/counts", timeout=20).json() == {"by_hit": 4, "by_load": 0, "stale": 0}
        for path, body, status in (
            ("/choose", {"text": "x"}, 400),
            ("/choose", {"input_ids": [-1] * 40}, 400),
            ("/ended", {"worker": "nobody"}, 400),
            ("/nowhere", {}, 404),
        ):
            answer = post(path, body)
            assert answer.status_code == status and answer.json()["error"]
    finally:
        service.shutdown()
        service.server_close()


def test_no_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="no workers"):
        Chooser({}, PAGE)
