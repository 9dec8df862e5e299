"""State events over real sockets against the real tree: a follower knows what the server holds."""

from __future__ import annotations

import os
import time

import pytest

from sglang_k3.prefix_cache import events_schema
from sglang_k3.prefix_cache.events_subscriber import Subscriber
from sglang_k3.prefix_cache.eviction import depth_of

STRATEGY = os.environ["K3_STRATEGY"]
pytestmark = pytest.mark.skipif("events" not in STRATEGY, reason="needs a publisher")
STATES = pytest.mark.skipif(STRATEGY != "events", reason="of the group schema")
JOINT = pytest.mark.skipif(STRATEGY != "joint events", reason="of joint mode")


@pytest.fixture
def follower():
    from tests.prefix_cache.inside.conftest import EVENTS, REPLAY

    with Subscriber(EVENTS, REPLAY) as made:
        yield made


def newcomer() -> Subscriber:
    from tests.prefix_cache.inside.conftest import EVENTS, REPLAY

    return Subscriber(EVENTS, REPLAY)


def settle(loop, follower) -> None:
    """Everything recorded is published, and everything published has been taken in."""
    loop.step(3)
    publisher = loop.scheduler.kv_events_publisher.kv_event_publisher
    for _ in range(200):
        if publisher._event_queue.empty():
            break
        time.sleep(0.02)
    time.sleep(0.15)
    # A first answer, which may be under way, is of what was published when it was asked for.
    assert comes_true(follower, lambda: follower.synced)
    assert comes_true(follower, follower.catch_up)


def comes_true(follower, condition) -> bool:
    """Within a time that a busy machine needs, too."""
    ends = time.monotonic() + 30
    while not condition():
        if time.monotonic() > ends:
            return False
        follower.poll(50)
    return True


def held(loop, states) -> tuple[dict[int, int], set[int]]:
    """What the tree holds: hash -> depth of each state, and the hashes of all KV blocks."""
    recorder, tree = states.events, loop.scheduler.tree_cache.tree_core
    found, blocks, waiting = {}, set(), [tree.root_node]
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children.values())
        if node is not tree.root_node:
            hashes = recorder._hashes(node)
            blocks.update(hashes)
            if recorder.holds(node):
                found[hashes[-1]] = depth_of(node)
    return found, blocks


def pressure(told, prompt, rounds: int = 14) -> None:
    """Sessions, forks and one-offs, more of them than the twelve slots hold."""
    sessions = [prompt(90, seed=s) for s in range(4)]
    for number in range(rounds):
        session = number % 4
        told(sessions[session], 4 if number % 3 else 70)
        sessions[session] = [*sessions[session], *prompt(25, seed=50 + number)]
        told([*sessions[session][:80], *prompt(30, seed=90 + number)], 2)


@STATES
def test_a_follower_holds_exactly_the_servers_states_under_eviction(loop, told, prompt, states, follower):
    follower.poll(100)
    pressure(told, prompt)
    settle(loop, follower)
    want, blocks = held(loop, states)
    assert {key: event.token_depth for key, event in follower.holdings.states.items()} == want
    assert len(want) >= 4
    assert set(follower.holdings.blocks) == blocks
    size = states.surroundings.state_bytes
    assert {event.state_bytes for event in follower.holdings.states.values()} == {size}


@STATES
def test_a_newcomer_is_told_what_was_stored_before_the_oldest_batch_kept(loop, told, prompt, states):
    pressure(told, prompt)
    publisher = loop.scheduler.kv_events_publisher.kv_event_publisher
    with newcomer() as late:
        settle(loop, late)
        assert publisher._buffer[0][0] > 0, "the buffer still holds everything"
        want, blocks = held(loop, states)
        assert {key: event.token_depth for key, event in late.holdings.states.items()} == want
        assert set(late.holdings.blocks) == blocks
        # And it goes on from there.
        told(prompt(77, seed=5), 3)
        settle(loop, late)
        assert {key: e.token_depth for key, e in late.holdings.states.items()} == held(loop, states)[0]


@STATES
@pytest.mark.parametrize("missed", [5, 60])
def test_missed_batches_are_noticed_and_made_up_for(loop, told, prompt, states, follower, missed):
    """5 are still in the publisher's buffer; 60 are not."""
    pressure(told, prompt, 2)
    settle(loop, follower)
    gaps = follower.gaps
    take, dropped = follower._take, []
    follower._take = lambda number, payload: dropped.append(number)
    sent = follower._last
    for number in range(missed):
        told(prompt(40, seed=200 + number), 2)
    loop.step(3)
    assert comes_true(follower, lambda: len(dropped) >= missed)
    del follower._take
    assert take == follower._take and follower._last == sent
    told(prompt(40, seed=999), 2)
    loop.step(3)
    assert comes_true(follower, lambda: follower.gaps > gaps)
    assert follower.gaps == gaps + 1
    settle(loop, follower)
    assert {key: e.token_depth for key, e in follower.holdings.states.items()} == held(loop, states)[0]


@STATES
def test_a_flush_leaves_nothing(loop, told, prompt, states, follower):
    pressure(told, prompt, 3)
    loop.flush()
    settle(loop, follower)
    assert not follower.holdings.states and not follower.holdings.blocks


@STATES
def test_predicted_hits_are_the_servers_hits(loop, told, prompt, states, follower):
    """The deepest state within KV, request by request, forks and evicted states too."""
    page = 16
    sessions = [prompt(90, seed=s) for s in range(3)]
    hits = 0
    for number in range(18):
        session = number % 3
        ids = sessions[session]
        if number % 5 == 4:
            ids = [*ids[: len(ids) * 2 // 3], *prompt(40, seed=300 + number)]
        settle(loop, follower)
        predicted = follower.holdings.hit(hashes(ids, page)[: (len(ids) - 1) // page], page)
        assert told(ids, 4)[1] == predicted
        hits += predicted > 0
        sessions[session] = [*ids, *prompt(30, seed=400 + number)]
    assert hits > 8


@JOINT
def test_blocks_alone_predict_the_hits_of_linear_histories(loop, told, prompt, states, follower):
    page = 16
    sessions = [prompt(90, seed=s) for s in range(4)]
    hits = 0
    for number in range(20):
        ids = sessions[number % 4]
        settle(loop, follower)
        assert not follower.holdings.states, "joint mode says nothing of states"
        predicted = follower.holdings.kv_hit(hashes(ids, page)[: (len(ids) - 1) // page], page)
        answer, hit = told(ids, 4)
        assert hit == predicted
        hits += hit > 0
        sessions[number % 4] = [*ids, *answer[0], *prompt(30, seed=400 + number)]
    assert hits > 8


@JOINT
def test_at_a_fork_the_error_is_what_lies_between_it_and_the_state_above(
    loop, told, prompt, states, follower
):
    page = 16
    long = prompt(200, seed=1)
    told(long, 2)
    settle(loop, follower)
    fork = [*long[:130], *prompt(40, seed=2)]
    predicted = follower.holdings.kv_hit(hashes(fork, page)[: (len(fork) - 1) // page], page)
    _, hit = told(fork, 2)
    # The only state stands in front of the answer's opening, behind the fork.
    assert (predicted, hit) == (128, 0)


def hashes(ids: list[int], page: int) -> list[int]:
    """A consumer's own hashes of a prompt's whole pages: SHA-256 chained, the first 8 bytes signed."""
    from array import array

    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str, hash_str_to_int64

    whole = len(ids) // page * page
    key = RadixKey(array("q", ids[:whole]), None)
    return [hash_str_to_int64(one) for one in get_storage_hash_str(key, None, page_size=page)]


def test_batches_decode_by_the_documented_schema(loop, told, prompt, follower):
    told(prompt(60, seed=1), 2)
    settle(loop, follower)
    groups = {event.kv_cache_spec_kind for event in follower.holdings.blocks.values()}
    assert groups == ({events_schema.KV_KIND} if STRATEGY == "events" else {None})
