"""Publisher and subscriber over real sockets, without a server behind them: restarts, late comers, deaf
ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from sglang.srt.disaggregation.kv_events import EventBatch

from sglang_k3.prefix_cache.events_index import Holdings
from sglang_k3.prefix_cache.events_publisher import (
    EVERYWHERE,
    SnapshotPublisher,
    batches_per_second,
    mode_of,
    with_token_ids,
)
from sglang_k3.prefix_cache.events_schema import (
    KV_GROUP,
    KV_KIND,
    STATE_GROUP,
    STATE_KIND,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    decode,
)
from sglang_k3.prefix_cache.events_subscriber import Subscriber
from sglang_k3.testing.server_process import free_port


def kv(*hashes: int, parent: int | None = None) -> BlockStored:
    tokens = [token for block in hashes for token in range(16 * (block % 5000), 16 * (block % 5000) + 16)]
    return BlockStored(
        list(hashes), parent, tokens, 16, group_idx=KV_GROUP, kv_cache_spec_kind=KV_KIND, medium="GPU"
    )


def state(block: int, depth: int) -> BlockStored:
    return BlockStored(
        [block], None, [], 16, group_idx=STATE_GROUP, kv_cache_spec_kind=STATE_KIND, token_depth=depth
    )


def gone(block: int, kind: str) -> BlockRemoved:
    return BlockRemoved(
        [block], group_idx=KV_GROUP if kind == KV_KIND else STATE_GROUP, kv_cache_spec_kind=kind
    )


@pytest.fixture
def ports() -> tuple[str, str]:
    return f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def publisher(ports) -> Iterator[Callable[..., SnapshotPublisher]]:
    """Starts publishers on the two ports, one behind the other."""
    running: list[SnapshotPublisher] = []

    def start(**options: Any) -> SnapshotPublisher:
        while running:
            running.pop().shutdown()
        for _ in range(200):
            try:
                made = SnapshotPublisher(0, endpoint=ports[0], replay_endpoint=ports[1], bind=True, **options)
            except zmq.ZMQError as error:
                # The port of the one before is given back by a thread of ZeroMQ's, soon.
                assert error.errno == zmq.EADDRINUSE
                time.sleep(0.05)
            else:
                running.append(made)
                return made
        raise AssertionError("the port of the publisher before is still taken")

    yield start
    for one in running:
        one.shutdown()


def publish(publisher: SnapshotPublisher, *batches: list[Any]) -> None:
    """And wait until they are out."""
    last = publisher._buffer[-1][0] if publisher._buffer else -1
    for events in batches:
        publisher.publish(EventBatch(ts=time.time(), events=events))
    for _ in range(500):
        if publisher._buffer and publisher._buffer[-1][0] == last + len(batches):
            return
        time.sleep(0.01)
    raise AssertionError("the publisher's thread does not publish")


def heard(subscriber: Subscriber) -> Holdings:
    ends = time.monotonic() + 30
    while time.monotonic() < ends:
        if subscriber.poll(20) and subscriber.catch_up():
            return subscriber.holdings
    raise AssertionError("the subscriber does not catch up")


def test_a_removed_state_leaves_its_kv(publisher, ports) -> None:
    worker = publisher()
    with Subscriber(*ports) as follower:
        publish(worker, [kv(1, 2, 3), state(3, 48)], [kv(4, parent=3)], [gone(3, STATE_KIND)])
        found = heard(follower)
        assert set(found.blocks) == {1, 2, 3, 4} and not found.states
        assert found.blocks[2].parent_block_hash == 1 and found.blocks[2].token_ids == list(range(32, 48))
        publish(worker, [state(2, 32), gone(4, KV_KIND)])
        found = heard(follower)
        assert set(found.blocks) == {1, 2, 3} and found.states[2].token_depth == 32
        assert (found.hit([1, 2, 3], 16), found.kv_hit([1, 2, 3], 16), found.hit([1, 9], 16)) == (32, 48, 0)


def test_catching_up_is_not_content_with_an_answer_from_before(publisher, ports) -> None:
    worker = publisher()
    publish(worker, [kv(1), state(1, 16)])
    with Subscriber(*ports) as follower:
        follower.ask()
        assert follower._question is not None and follower._question.socket.poll(30_000)
        publish(worker, [kv(2), state(2, 16)])
        assert follower.catch_up() and set(follower.holdings.states) == {1, 2}


def test_a_late_joiner_gets_what_the_buffer_has_forgotten(publisher, ports) -> None:
    worker = publisher(buffer_steps=3)
    publish(worker, [kv(1, 2), state(2, 32)], *([kv(number)] for number in range(10, 20)))
    with Subscriber(*ports) as late:
        found = heard(late)
        assert set(found.states) == {2} and set(found.blocks) == {1, 2, *range(10, 20)}
        publish(worker, [gone(2, STATE_KIND)])
        assert not heard(late).states
        assert (late.gaps, late.restarts) == (0, 0)


@pytest.mark.parametrize("batches", [1, 6, 9])
def test_a_worker_that_came_anew_is_not_taken_for_the_old_one(publisher, ports, batches) -> None:
    """It has published fewer batches than the old one, as many, more."""
    worker = publisher()
    with Subscriber(*ports) as follower:
        publish(worker, *([kv(number), state(number, 16)] for number in range(6)))
        assert set(heard(follower).states) == set(range(6))
        anew = publisher()
        publish(anew, *([kv(number), state(number, 16)] for number in range(100, 100 + batches)))
        found = heard(follower)
        assert set(found.states) == set(found.blocks) == set(range(100, 100 + batches))
        assert follower.restarts == 1


def test_a_worker_that_came_anew_and_said_one_thing_is_noticed_by_its_connection(publisher, ports) -> None:
    """Its only batch is out before the follower is connected again; nothing else is ever said."""
    worker = publisher()
    with Subscriber(*ports) as follower:
        publish(worker, [kv(1), state(1, 16)], [kv(2), state(2, 16)])
        assert set(heard(follower).states) == {1, 2}
        publish(publisher(), [kv(7), state(7, 16)])
        ends = time.monotonic() + 30
        while not (follower.poll(20) and follower.restarts) and time.monotonic() < ends:
            pass
        assert set(follower.holdings.states) == {7} and follower.restarts == 1 and follower.synced


def test_a_worker_that_does_not_answer_is_not_believed(publisher, ports) -> None:
    with Subscriber(*ports, timeout_ms=100) as follower:
        assert not follower.poll(10) and not follower.synced
        worker = publisher()
        publish(worker, [kv(1), state(1, 16)])
        assert set(heard(follower).states) == {1} and follower.synced


def test_publishing_goes_on_beside_a_subscriber_that_reads_nothing(publisher, ports) -> None:
    worker = publisher(hwm=2, buffer_steps=10)
    deaf = zmq.Context.instance().socket(zmq.SUB)
    deaf.set_hwm(1)
    deaf.setsockopt_string(zmq.SUBSCRIBE, "")
    deaf.connect(ports[0])
    try:
        publish(worker, *([kv(number), state(number, 16)] for number in range(3000)))
        assert len(worker._buffer) == 10 and worker._event_queue.empty()
        with Subscriber(*ports) as follower:
            assert set(heard(follower).states) == set(range(3000))
    finally:
        deaf.close(linger=0)


def test_a_pace_joins_what_comes_too_fast_and_loses_nothing(publisher, ports) -> None:
    worker = publisher(batches_per_second=4)
    with Subscriber(*ports) as follower:
        publish(worker, [kv(0), state(0, 16)])
        for number in range(1, 40):
            events = [kv(number), state(number, 16), gone(number - 1, STATE_KIND)]
            worker.publish(EventBatch(ts=float(number), events=events))
        for _ in range(400):
            if decode(worker._buffer[-1][1]).ts == 39.0:
                break
            time.sleep(0.05)
        found = heard(follower)
        assert set(found.states) == {39} and set(found.blocks) == set(range(40))
        # The first at once, and the rest a quarter of a second behind it.
        assert 2 <= len(worker._buffer) <= 4


def test_a_pace_is_a_positive_number() -> None:
    assert batches_per_second("{}") == math.inf
    assert batches_per_second('{"batches_per_second": 20}') == 20.0
    for wrong in ("0", "-1", "true", '"fast"', "null"):
        with pytest.raises(ValueError, match="batches_per_second is"):
            batches_per_second('{"batches_per_second": ' + wrong + "}")


def test_a_malformed_request_for_replay_is_passed_over(publisher, ports) -> None:
    worker = publisher()
    publish(worker, [kv(1)])
    strange = zmq.Context.instance().socket(zmq.DEALER)
    strange.linger = 0
    strange.connect(ports[1])
    try:
        strange.send_multipart((b"", b"since yesterday"))
        strange.send(b"?")
        with Subscriber(*ports) as follower:
            assert set(heard(follower).blocks) == {1}
    finally:
        strange.close()


def test_left_to_itself_it_binds_loopback() -> None:
    made = SnapshotPublisher(0, endpoint=EVERYWHERE)
    try:
        assert made._local_pub_endpoint == "tcp://127.0.0.1:5557"
    finally:
        made.shutdown()


def test_a_snapshot_is_a_batch_like_any_other() -> None:
    held = Holdings()
    held.apply(Batch(0.0, [kv(1, 2), state(2, 32), kv(3, parent=2), gone(1, KV_KIND)]))
    again = Holdings()
    again.apply(Batch(0.0, [kv(9), state(9, 16)]))
    again.apply(Batch(0.0, list(held.events())))
    assert isinstance(held.events()[0], AllBlocksCleared)
    assert again.blocks == held.blocks and again.states == held.states


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (None, None),
        ('{"publisher": "zmq"}', None),
        ('{"publisher": "states"}', "states"),
        ('{"publisher": "joint"}', "joint"),
    ],
)
def test_the_publishers_name_is_the_mode(config, mode) -> None:
    assert mode_of(config) == mode


def test_token_ids_is_true_or_false() -> None:
    assert with_token_ids("{}") and not with_token_ids('{"token_ids": false}')
    with pytest.raises(ValueError, match="token_ids is 'no'"):
        with_token_ids('{"token_ids": "no"}')
