"""Nothing of a request survives its end: aborted, retracted, poisoned and reused rows change no other
text."""

from __future__ import annotations

import math

import pytest
import torch


def text(loop, ids, tokens, **sampling):
    """What a request writes with the scheduler to itself."""
    request = loop.admit(f"alone {len(ids)} {tokens} {sampling}", ids, tokens, **sampling)
    loop.finish(request)
    loop.flush()
    return list(request.output_ids)


def poison(loop, *running):
    """NaN in every record, state and window that no running request owns. What is read must be written
    before."""
    pool = loop.scheduler.req_to_token_pool
    records, cache = pool.mamba_pool.records, pool.mamba_pool.mamba_cache
    rows = {int(r.kv.req_pool_idx) for r in running if r.kv is not None and r.kv.req_pool_idx is not None}
    others = [row for row in range(records.depth.shape[0]) if row not in rows]
    for bank in (records.u, records.k, records.g, records.x, records.windows):
        if bank is not None:
            bank[:, others] = math.nan
    free = pool.mamba_allocator.free_slots
    slots = torch.as_tensor(list(free) if not isinstance(free, torch.Tensor) else free).long()
    cache.temporal[:, slots] = math.nan
    cache.conv[0][:, slots] = math.nan


def test_poisoned_free_rows_and_slots_change_no_text(loop, prompt):
    asked = [(prompt(30 + 7 * i, seed=i), 40) for i in range(3)]
    alone = [text(loop, ids, tokens) for ids, tokens in asked]
    requests = [loop.admit(f"r{i}", ids, tokens) for i, (ids, tokens) in enumerate(asked)]
    while not all(request.finished() for request in requests):
        poison(loop, *requests)
        loop.step()
    loop.step(3)
    assert [list(request.output_ids) for request in requests] == alone


@pytest.mark.parametrize("turns", range(1, 7))
def test_an_aborted_requests_row_is_reused_at_once(loop, prompt, turns):
    """Aborted with a step under way; its row, bank and slot go to the next request, full of poison."""
    keeps, comes = prompt(45, seed=1), prompt(50, seed=2)
    alone = text(loop, keeps, 40), text(loop, comes, 40)
    staying = loop.admit("staying", keeps, 40)
    victim = loop.admit("victim", prompt(33, seed=3), 200)
    loop.step(turns)
    loop.abort("victim")
    newcomer = loop.admit("newcomer", comes, 40)
    poison(loop, staying, newcomer, victim)
    while not (staying.finished() and newcomer.finished()):
        loop.step()
        poison(loop, staying, newcomer, victim)
    loop.step(3)
    assert victim.finished()
    assert (list(staying.output_ids), list(newcomer.output_ids)) == alone


def test_retraction_and_resumption_change_no_text(loop, prompt):
    asked = [(prompt(40 + 5 * i, seed=20 + i), 48) for i in range(4)]
    alone = [text(loop, ids, tokens) for ids, tokens in asked]
    requests = [loop.admit(f"r{i}", ids, tokens) for i, (ids, tokens) in enumerate(asked)]
    scheduler, retracted = loop.scheduler, 0
    for _ in range(400):
        loop.step()
        if all(request.finished() for request in requests):
            break
        running = scheduler.running_batch
        if (
            retracted < 3
            and len(running.reqs) >= 2
            and min(len(r.output_ids) for r in running.reqs) > 5 * (retracted + 1)
        ):
            loop.retract()
            retracted += 1
    loop.step(3)
    assert retracted >= 2
    assert [list(request.output_ids) for request in requests] == alone


def test_a_prefix_hit_while_others_speculate_is_exact(loop, prompt):
    shared = prompt(150, seed=5)
    first, second = [*shared, *prompt(9, seed=6)], [*shared, *prompt(11, seed=7)]
    alone = text(loop, first, 30), text(loop, second, 30)
    one = loop.admit("one", first, 30)
    loop.step(6)
    two = loop.admit("two", second, 30)
    loop.finish(one, two)
    assert (list(one.output_ids), list(two.output_ids)) == alone


def test_a_stop_inside_an_accepted_run_ends_text_and_state_there(loop, prompt):
    ids = prompt(70, seed=8)
    whole = text(loop, ids, 40)
    stop = whole[25]
    cut = text(loop, ids, 40, ignore_eos=False, stop_token_ids=[stop])
    assert cut == whole[: whole.index(stop) + 1]
    again = loop.admit("again", [*ids, *cut, *prompt(5, seed=9)], 12)
    loop.finish(again)
    after = list(again.output_ids)
    loop.flush()
    assert after == text(loop, [*ids, *cut, *prompt(5, seed=9)], 12)


def test_more_requests_than_rows_wait_and_are_all_served(loop, prompt):
    asked = [(prompt(20 + i, seed=40 + i), 12) for i in range(14)]
    alone = [text(loop, ids, tokens) for ids, tokens in asked]
    requests = [loop.admit(f"r{i}", ids, tokens) for i, (ids, tokens) in enumerate(asked)]
    loop.finish(*requests)
    assert [list(request.output_ids) for request in requests] == alone
    assert max(len(loop.scheduler.running_batch.reqs), 0) == 0
