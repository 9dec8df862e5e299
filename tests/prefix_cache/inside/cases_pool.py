"""A state pool that is too small, or refuses a slot: fewer hits and longer waits, right answers, no leak."""

from __future__ import annotations

import os
import random

import pytest

from sglang_k3.prefix_cache.outcome import Outcome

PAGE = 1 if os.environ.get("K3_STRATEGY") == "no_buffer" else 16


class Refusing:
    """The pool's allocator says no at its n-th allocation from now, and at so many in a row."""

    def __init__(self, loop, nth, times=1):
        self.allocator = loop.scheduler.req_to_token_pool.mamba_allocator
        self.left, self.times, self.refused = nth, times, 0

    def __enter__(self):
        honest = type(self.allocator)._do_alloc

        def allocate(count):
            self.left -= 1
            if -self.times < self.left <= 0:
                self.refused += 1
                return None
            return honest(self.allocator, count)

        self.allocator._do_alloc = allocate
        return self

    def __exit__(self, *error):
        del self.allocator._do_alloc


@pytest.fixture(scope="module")
def three(loop):
    """Three prompts of one beginning, and what each is told alone."""
    draw = random.Random(1)
    shared = [draw.randrange(1500) for _ in range(50)]
    asked = [[*shared, *(draw.randrange(1500) for _ in range(30))] for _ in range(3)]
    alone = []
    for ids in asked:
        loop.flush()
        request = loop.admit(f"alone {len(alone)}", ids, 12, logprobs=True)
        loop.finish(request)
        alone.append((tuple(request.output_ids), tuple(request.logprob.output_token_logprobs_val)))
    return asked, alone


@pytest.mark.parametrize("nth", range(1, 19))
def test_each_allocation_may_fail_once(loop, told, three, nth):
    asked, alone = three
    with Refusing(loop, nth) as refusing:
        requests = [loop.admit(f"refused {i}", ids, 12, logprobs=True) for i, ids in enumerate(asked)]
        loop.finish(*requests)
    assert refusing.refused or nth > 8
    written = [(tuple(r.output_ids), tuple(r.logprob.output_token_logprobs_val)) for r in requests]
    assert written == alone
    assert [told(ids, 12)[0] for ids in asked] == alone


@pytest.mark.parametrize("refusals, waits", [(3, 0), (5, 1)])
def test_a_hit_without_a_slot_for_its_copy_is_given_up(loop, told, prompt, states, refusals, waits):
    """SGLang asks for the queue's slots at once, then the hit's copy does twice, then the request's start
    twice; the last refusal makes it wait, and on its second try all is well."""
    ids = prompt(70, seed=3)
    longer = [*ids, *prompt(9, seed=4)]
    want, _ = told(longer)
    loop.flush()
    told(ids)
    before = states.metrics.waits
    with Refusing(loop, 1, refusals):
        request = loop.admit("without a slot", longer, 6, logprobs=True)
        loop.finish(request)
    assert tuple(request.output_ids) == want[0]
    assert states.metrics.waits - before == waits
    depth = 32 if PAGE > 1 else 70
    given_up = Outcome(hit=0, no_slot=depth)
    assert request.prefix_outcome == (Outcome(hit=depth) if waits else given_up)


def test_a_state_evicted_from_under_its_kv_costs_tokens_and_no_text(loop, told, prompt, states):
    """KV of the first prompt stays; ours is the count of what its missing state cost."""
    ids = prompt(100, seed=5)
    cold, _ = told(ids)
    depth = 64
    cache = loop.scheduler.tree_cache
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    # A longer prompt through it makes the state an inner one: a leaf would take its KV along.
    told([*ids, *prompt(60, seed=6)])
    held = cache.mamba_evictable_size()
    cache.evict(EvictParams(mamba_num=1))
    assert cache.mamba_evictable_size() == held - 1
    before = dict(states.metrics.outcomes)
    again, hit = told(ids)
    gained = {name: states.metrics.outcomes[name] - before[name] for name in before}
    assert again == cold
    if PAGE > 1:
        assert (hit, gained["evicted"]) == (0, depth)
    assert gained["hit"] == hit


# tests/server/test_prefix_cache.py has the same on a real server, with one strategy.
@pytest.mark.verify
def test_more_sessions_than_the_pool_has_states_for(loop, told, prompt):
    """Eight sessions of six turns, one turn of each after the other; every third turn edits the middle."""

    def turn(history, session, number):
        if number % 3 == 2:
            cut = len(history) // 2
            history = [*history[:cut], *prompt(11, seed=1000 + 10 * session + number), *history[cut + 11 :]]
        return [*history, *prompt(20 + 3 * session, seed=100 * session + number)]

    def play(cold):
        histories, texts, hits = [[] for _ in range(8)], [], 0
        for number in range(6):
            for session in range(8):
                ids = turn(histories[session], session, number)
                text, hit = told(ids, 12)
                texts.append(text)
                hits += hit
                histories[session] = [*ids, *text[0]]
                if cold:
                    loop.flush()
        return texts, hits

    cold, nothing = play(cold=True)
    warm, hits = play(cold=False)
    assert nothing == 0
    assert warm == cold
    print(f"{hits} tokens from the cache")
    # Without buffers each turn leaves two states, at the prompt's end and the answer's: the pool forgets all.
    assert hits > 500 or PAGE == 1


def test_a_prompt_longer_than_the_pools_states_can_follow(loop, told, prompt):
    """Chunks of 256 leave a state each; the path alone has more than the pool."""
    ids = prompt(1500, seed=7)
    cold, _ = told(ids, 4)
    assert told(ids, 4)[0] == cold
    loop.flush()
    assert told(ids, 4)[0] == cold


def test_what_was_found_and_lost_adds_up_to_what_was_cached(loop, told, prompt, states):
    """Each answer's own count against the counters."""
    shared = prompt(90, seed=8)
    before = dict(states.metrics.outcomes)
    total = {name: 0 for name in before}
    for length, seed in ((90, 0), (40, 1), (66, 2), (90, 3), (90, 0), (12, 4)):
        ids = [*shared[:length], *(prompt(25, seed=50 + seed) if seed else ())]
        request = loop.admit(f"count {length} {seed}", ids, 3)
        loop.finish(request)
        outcome = request.prefix_outcome
        assert outcome.hit == request.cached_tokens
        total["hit"] += outcome.hit
        for reason, tokens in outcome.lost.items():
            total[reason] += tokens
    assert {name: states.metrics.outcomes[name] - before[name] for name in before} == total
    assert total["hit"] >= 90 and total["none_stored"] > 0


def test_a_retracted_request_goes_on_from_its_last_boundary(loop, prompt):
    """What it wrote before stays: no more of it is computed again than lies behind its last checkpoint."""
    asked = [(prompt(40, seed=31), 110), (prompt(55, seed=32), 110)]
    whole = []
    for number, (ids, tokens) in enumerate(asked):
        loop.flush()
        request = loop.admit(f"whole {number}", ids, tokens)
        loop.finish(request)
        whole.append(list(request.output_ids))
    loop.flush()
    requests = [loop.admit(f"r{number}", ids, tokens) for number, (ids, tokens) in enumerate(asked)]
    while min(len(request.output_ids) for request in requests) < 95:
        loop.step()
    loop.retract()
    (taken,) = [request for request in requests if request.is_retracted]
    written = len(taken.origin_input_ids) + len(taken.output_ids)
    while taken.is_retracted:
        loop.step()
    spacing = 1 if PAGE == 1 else 64
    assert taken.prefix_len >= (written - 9) // spacing * spacing
    loop.finish(*requests)
    assert [list(request.output_ids) for request in requests] == whole
