"""What a step leaves in the pools, whatever was accepted: the state that plain prefill would have left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sglang_k3.speculative.acceptance import Accepted
from sglang_k3.testing.loop import Loop

ROWS = 8


def forced(loop: Loop, schedule: Iterator[list[int]]) -> None:
    """From now on the worker verifies all drafts and accepts as many as the schedule says, right or wrong."""
    worker = loop.worker
    worker._planner.budget = None

    def accept(batch, logits, candidates, proposal, window):
        chosen = logits.argmax(-1).view(candidates.shape)
        counts = torch.tensor(next(schedule)[: len(candidates)])
        tokens = torch.cat([candidates[:, 1:], chosen[:, -1:]], 1)
        last = (counts - 1).unsqueeze(1)
        return Accepted(counts, tokens.scatter(1, last, chosen.gather(1, last)))

    worker._accept = accept


def state_of(loop: Loop, request) -> tuple[torch.Tensor, torch.Tensor]:
    """(S, window) of a running request, all layers, copied; read as every reader has to. What that changes is
    put back: an anchor stays at its boundary."""
    pool = loop.scheduler.req_to_token_pool.mamba_pool
    cache, records = pool.mamba_cache, pool.records
    known = int(records.slot[request.kv.req_pool_idx])
    slot = int(request.kv.mamba_pool_idx) if known < 0 else known
    counters = records.depth, records.slot, records.starts, records.tails
    before = cache.temporal[:, slot].clone(), cache.conv[0][:, slot].clone(), [c.clone() for c in counters]
    records.settle_slots(pool, torch.tensor([slot]))
    found = cache.temporal[:, slot].clone(), cache.conv[0][:, slot].clone()
    cache.temporal[:, slot], cache.conv[0][:, slot] = before[:2]
    for counter, value in zip(counters, before[2], strict=True):
        counter.copy_(value)
    return found


def prefilled(loop: Loop, tokens: list[int], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same after a prefill of these tokens from nothing."""
    loop.flush()
    request = loop.admit(name, tokens, 4)
    # Without overlap the turn that admits a short prompt has prefilled it, and nothing else.
    before = state_of(loop, request) if request.output_ids else None
    while not request.output_ids:
        before = None
        loop.step()
        if request.kv is not None and request.kv.mamba_pool_idx is not None:
            before = state_of(loop, request)
    assert before is not None
    loop.finish(request)
    return before


def test_states_after_forced_acceptance_are_those_of_a_prefill(loop, prompt):
    """Five requests side by side accept [0, 3, 7, 1, 8] less one each, then [3, 0, 0, 2, 7]: a run always
    keeps the target's own token, so the least a step commits is one.
    """
    schedule = [[1, 3, 7, 1, 8], [3, 1, 1, 2, 8], [8, 8, 8, 8, 8]]
    forced(loop, iter([*schedule, *[[1] * 5] * 200]))
    requests = [loop.admit(f"r{i}", prompt(20 + 9 * i, seed=i), 60) for i in range(5)]
    seen: dict[int, tuple] = {}
    while len(seen) < 5:
        loop.step()
        for i, request in enumerate(requests):
            if i not in seen and len(request.output_ids) >= 20:
                # Between two turns a step may be under way whose result is not in: its tokens are in the
                # state.
                seen[i] = (state_of(loop, request), request)
    loop.worker.__dict__.pop("_accept", None)
    loop.finish(*requests)
    for i, ((state, window), request) in seen.items():
        text = [*request.origin_input_ids, *request.output_ids]
        depth = matching_depth(loop, text, state, window, len(request.origin_input_ids))
        assert depth is not None, f"request {i}: no prefix of its text has this state"


def matching_depth(loop, text, state, window, least):
    """The depth at which a prefill of the text leaves exactly this state; None if there is none."""
    for depth in range(least + 12, least + 40):
        got = prefilled(loop, text[:depth], f"oracle{depth}-{len(text)}-{least}")
        if torch.equal(got[0], state) and torch.equal(got[1], window):
            return depth
    return None


@pytest.mark.parametrize("offset", range(-8, 9))
def test_a_boundary_inside_the_accepted_run_leaves_a_checkpoint(loop, prompt, offset):
    """A prompt that ends `offset` tokens from the grid, then runs of eight over it: a later hit is exact."""
    start = prompt(128 + offset, seed=100 + offset)
    forced(loop, iter([[ROWS]] * 100))
    writer = loop.admit("writer", start, 80)
    loop.finish(writer)
    loop.worker.__dict__.pop("_accept", None)
    text = [*start, *writer.output_ids]
    asked = [*text[:195], *prompt(20, seed=7)]
    reader = loop.admit("reader", asked, 12)
    loop.finish(reader)
    assert reader.cached_tokens >= 192, "the boundary at 192 was crossed inside a run"
    loop.flush()
    cold = loop.admit("cold", asked, 12)
    loop.finish(cold)
    assert cold.cached_tokens == 0
    assert list(reader.output_ids) == list(cold.output_ids)


@pytest.mark.parametrize("tokens", (63, 64, 65, 66, 68, 72, 73))
def test_a_boundary_crossed_by_the_finishing_step_serves_who_comes_with_it(loop, prompt, tokens):
    """The writer's last run crosses depth 192 or just does not; its reader is there before it has ended."""
    start = prompt(128, seed=300)
    first = loop.admit("first", start, tokens)
    loop.finish(first)
    asked = [*start, *first.output_ids, *prompt(20, seed=7)]
    loop.flush()
    cold = loop.admit("cold", asked, 12)
    loop.finish(cold)
    loop.flush()
    writer = loop.admit("writer", start, tokens)
    while len(writer.output_ids) < tokens - ROWS:
        loop.step()
    reader = loop.admit("reader", asked, 12)
    loop.finish(writer, reader)
    again = loop.admit("again", asked, 12)
    loop.finish(again)
    assert list(writer.output_ids) == list(first.output_ids)
    assert list(reader.output_ids) == list(again.output_ids) == list(cold.output_ids)
    assert again.cached_tokens >= 128


def test_no_tensor_of_the_pools_has_a_draft_dimension_beside_a_state(loop):
    pool = loop.scheduler.req_to_token_pool.mamba_pool
    heads, value_dim, key_dim = pool.mamba_cache.temporal.shape[2:]
    found = []

    def look(holder, path, depth=0):
        for name, value in vars(holder).items():
            values = value if isinstance(value, (list, tuple)) else [value]
            for item in values:
                if isinstance(item, torch.Tensor):
                    found.append((f"{path}.{name}", tuple(item.shape)))
                elif depth < 2 and hasattr(item, "__dict__") and type(item).__module__.startswith("sglang"):
                    look(item, f"{path}.{name}", depth + 1)

    look(pool, "mamba_pool")
    states = [(name, shape) for name, shape in found if shape[-2:] == (value_dim, key_dim)]
    assert [name for name, _ in states] == ["mamba_pool.mamba_cache.temporal"]
    assert states[0][1] == (3, 41, heads, value_dim, key_dim)
    assert any(name.endswith("records.u") for name, _ in found)
    assert pool.mamba_cache.conv[0].shape[2] == 3, "the window is no wider than the convolution needs"


def test_the_draft_sees_its_context_in_the_slots_of_the_tokens(loop, prompt):
    """After some steps the draft's cache holds, for each committed token, what a prefill would have put
    there."""
    request = loop.admit("a", prompt(40), 24)
    loop.finish(request)
    text = [*request.origin_input_ids, *request.output_ids]
    runner = loop.worker.draft_model_runner
    loop.flush()
    reader = loop.admit("b", text, 8)
    while not reader.output_ids:
        loop.step()
    row = loop.scheduler.req_to_token_pool.req_to_token[reader.kv.req_pool_idx]
    keys = [buffer[row[: len(text)].long()].clone() for buffer in runner.token_to_kv_pool.k_buffer]
    loop.finish(reader)
    loop.flush()
    writer = loop.admit("c", text[:40], 24)
    checked = 0
    while not writer.finished():
        loop.step()
        if writer.kv is None or writer.kv.req_pool_idx is None or len(writer.output_ids) < 10:
            continue
        known = len(writer.origin_input_ids) + len(writer.output_ids) - 1
        row = loop.scheduler.req_to_token_pool.req_to_token[writer.kv.req_pool_idx]
        for layer, buffer in enumerate(runner.token_to_kv_pool.k_buffer):
            assert torch.equal(buffer[row[:known].long()], keys[layer][:known])
        checked += 1
    assert checked > 3
