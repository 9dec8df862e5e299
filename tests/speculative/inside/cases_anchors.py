"""Requests whose states go from boundary to boundary: slots that they hold, and what they leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from sglang_k3.prefix_cache.admission import states_of
from sglang_k3.speculative.proposer import Proposal
from sglang_k3.testing.loop import Loop
from tests.speculative.inside.cases_commit import ROWS, forced

BOUNDARY = 64


@pytest.fixture
def states(loop: Loop):
    found = states_of(loop.scheduler.tree_cache)
    assert found is not None
    return found


@contextmanager
def no_free_slots(loop: Loop) -> Iterator[None]:
    """The pool's allocator has nothing to give."""
    allocator = loop.scheduler.req_to_token_pool.mamba_allocator
    allocator._do_alloc = lambda count: None
    try:
        yield
    finally:
        del allocator._do_alloc


def decoding(loop: Loop, request) -> None:
    while len(request.output_ids) < 2:
        loop.step()


def test_a_decoding_request_holds_one_slot_and_another_near_a_boundary(loop, prompt, states):
    request = loop.admit("one", prompt(70), 200)
    decoding(loop, request)
    held = {}
    while not request.finished():
        slots = states.slots()
        assert slots.running == 1
        held.setdefault(request.kv.kv_committed_len % BOUNDARY, set()).add(slots.held)
        loop.step()
    near = [counts for depth, counts in held.items() if depth >= BOUNDARY - ROWS]
    # A boundary's result comes in a turn later.
    far = [counts for depth, counts in held.items() if 2 * ROWS < depth < BOUNDARY - 2 * ROWS]
    assert near and all(counts == {1} for counts in near)
    assert far and all(counts == {0} for counts in far)


@pytest.mark.parametrize("tokens, hit", [(60, 128), (80, 64)])
def test_without_a_free_slot_an_anchor_moves_on_in_its_place(loop, prompt, tokens, hit):
    """One that ends before the next boundary comes near leaves it in the cache; another one, whose last step
    may have moved it on, leaves the prompt's checkpoint alone."""
    start = prompt(100, seed=1)
    alone = loop.admit("alone", start, tokens)
    loop.finish(alone)
    loop.flush()
    request = loop.admit("in place", start, tokens)
    decoding(loop, request)
    with no_free_slots(loop):
        loop.finish(request)
    assert list(request.output_ids) == list(alone.output_ids)
    asked = [*start, *alone.output_ids, *prompt(9, seed=2)]
    warm = loop.admit("warm", asked, 12)
    loop.finish(warm)
    loop.flush()
    cold = loop.admit("cold", asked, 12)
    loop.finish(cold)
    assert list(warm.output_ids) == list(cold.output_ids)
    assert (warm.cached_tokens, cold.cached_tokens) == (hit, 0)


def test_a_run_over_a_boundary_behind_its_stop_leaves_the_anchor_before_it(loop, prompt):
    """A stop string ends a request at 189 to 191 tokens, in a run of eight that reaches 196."""

    def propose(batch, anchors, drafting):
        """A text without repetitions."""
        depths = batch.seq_lens.unsqueeze(1) + torch.arange(1, ROWS)
        return Proposal(depths * 131 % 1500, None, None)

    start = prompt(100, seed=3)
    loop.worker._propose = propose
    forced(loop, iter([[ROWS]] * 100))
    writer = loop.admit("whole", start, 100)
    loop.finish(writer)
    loop.flush()
    decode = loop.scheduler.tokenizer.decode
    written = list(writer.output_ids)
    stop, end = next(
        (piece, at)
        for at in (91, 90, 92)
        for piece in [decode(written[at - 2 : at])]
        if piece and piece not in decode(written[: at - 1])
    )
    forced(loop, iter([[ROWS]] * 100))
    stopped = loop.admit("stopped", start, 100, stop=[stop])
    loop.finish(stopped)
    del loop.worker._accept, loop.worker._propose
    kept = list(stopped.output_ids_through_stop)
    assert kept == written[:end] and len(start) + len(kept) <= 192
    asked = [*start, *kept, *prompt(12, seed=4)]
    warm = loop.admit("warm", asked, 12)
    loop.finish(warm)
    loop.flush()
    cold = loop.admit("cold", asked, 12)
    loop.finish(cold)
    assert list(warm.output_ids) == list(cold.output_ids)
    assert (warm.cached_tokens, cold.cached_tokens) == (128, 0)


@pytest.mark.parametrize("depth", (120, 126, 128, 129))
def test_a_request_that_ends_near_a_boundary_gives_all_its_slots_back(loop, prompt, depth):
    allocator = loop.scheduler.req_to_token_pool.mamba_allocator
    free = allocator.available_size()
    request = loop.admit("ends", prompt(100, seed=5), 200)
    while len(request.origin_input_ids) + len(request.output_ids) < depth:
        loop.step()
    loop.abort("ends")
    loop.step(3)
    loop.flush()
    assert allocator.available_size() == free
