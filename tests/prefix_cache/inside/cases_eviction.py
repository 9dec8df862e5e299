"""Which state goes, in the real tree, and that a fork costs the prompt none of its own states."""

from __future__ import annotations

import os

import pytest

from sglang_k3.prefix_cache import eviction
from sglang_k3.prefix_cache.eviction_value import ByValue

BY_VALUE = pytest.mark.skipif(
    os.environ.get("K3_EVICTION") != "value", reason="the policy is chosen at the server's start"
)
PAGE = 1 if os.environ.get("K3_STRATEGY") == "no_buffer" else 16
BUFFERED = pytest.mark.skipif(
    os.environ.get("K3_STRATEGY") != "extra_buffer" or "K3_DRAFT" in os.environ or "K3_GRID" in os.environ,
    reason="the depths are those of pages of 16 with buffers",
)


@pytest.fixture
def policy(states):
    """Puts a policy in force for one test."""
    before = states.eviction

    def use(name, **config):
        states.eviction = eviction.make(name, config or None, states.surroundings)

    yield use
    states.eviction = before


def depths(loop, states) -> list[int]:
    """Of every state in the tree."""
    order, found = loop.scheduler.tree_cache.tree_core.lru_lists[states.component_type], []
    for node in order.cache.values():
        found.append(eviction.depth_of(node))
    return sorted(found)


@BY_VALUE
def test_eviction_by_value_measures_what_prefill_costs(states) -> None:
    assert isinstance(states.eviction, ByValue)
    cost = states.surroundings.cost
    assert cost.per_token > 0 and cost.per_pair >= 0
    assert states.surroundings.state_bytes == 3 * 4 * (4 * 64 * 64 + 3 * 3 * 4 * 64)


@BY_VALUE
@BUFFERED
def test_a_fork_and_the_prompts_own_end_are_both_kept(loop, told, prompt, states):
    shared = prompt(100, seed=1)
    one, two, three = ([*shared, *prompt(60, seed=seed)] for seed in (2, 3, 4))
    told(one, 2)
    cold, hit = told(two, 2)
    assert hit == 0 and depths(loop, states) == [96, 112, 112]
    assert told(three, 2)[1] == 96
    assert told([*two, *prompt(20, seed=5)], 2)[1] == 112
    loop.flush()
    assert told(two, 2) == (cold, 0)


@BUFFERED
def test_a_session_that_comes_back_outlives_prompts_that_do_not(loop, told, prompt, policy):
    """Nine slots for states. A session of four turns is followed by six prompts of one turn each, one state
    each and as recent as can be: by recency the session's states are the first to go."""

    def play():
        session = prompt(120, seed=1)
        for turn in range(4):
            told(session, 2)
            session = [*session, *prompt(30, seed=10 + turn)]
        for number in range(9):
            told(prompt(60, seed=100 + number), 2)
        hit = told(session, 2)[1]
        loop.flush()
        return hit

    policy("value")
    assert play() >= 160
    policy("path-lru")
    assert play() == 0


@BUFFERED
@pytest.mark.parametrize("name", [*eviction.OURS, "lru"])
def test_answers_are_the_same_under_every_policy(loop, told, prompt, policy, name):
    policy(name)
    shared = prompt(70, seed=1)
    asked = [[*shared, *prompt(20 + 7 * seed, seed=seed)] for seed in range(2, 8)]
    cold = []
    for ids in asked:
        cold.append(told(ids, 6)[0])
        loop.flush()
    assert [told(ids, 6)[0] for ids in [*asked, *asked]] == [*cold, *cold]
