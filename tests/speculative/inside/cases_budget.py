"""Rows by any budget change no text: ragged verifies, pauses, and requests that join and leave them."""

from __future__ import annotations

import pytest

from sglang_k3.speculative.budget_report import Spent, spent_on
from tests.speculative.inside.at_random import AtRandom


def written(loop, asked):
    """Texts of all asked requests, side by side."""
    requests = [
        loop.admit(f"r{i}", ids, tokens, **sampling) for i, (ids, tokens, sampling) in enumerate(asked)
    ]
    loop.finish(*requests)
    loop.flush()
    return [list(request.output_ids) for request in requests]


@pytest.fixture
def asked(prompt):
    """Greedy, seeded and penalised requests of many lengths, over boundaries of the prefix cache."""
    ways = (
        {},
        {"temperature": 0.8, "sampling_seed": 5},
        {"frequency_penalty": 0.7},
        {"presence_penalty": 0.5},
    )
    return [(prompt(40 + 17 * i, seed=i), 60 + i, ways[i % len(ways)]) for i in range(6)]


@pytest.mark.parametrize("seed", range(3))
def test_texts_are_those_of_full_verifies(loop, asked, seed):
    planner = loop.worker._planner
    planner.budget = None
    whole = written(loop, asked)
    planner.budget = AtRandom(seed)
    assert written(loop, asked) == whole
    assert {1, 3} <= planner.budget.widths, "steps of one row count and of several"


def test_each_request_and_the_server_know_what_was_spent(loop, prompt):
    planner = loop.worker._planner
    planner.budget, planner.spent = AtRandom(4), Spent()
    requests = [loop.admit(f"r{i}", prompt(30 + i, seed=i), 30) for i in range(3)]
    loop.finish(*requests)
    accounts = [spent_on(request) for request in requests]
    for name in ("steps", "rows", "paused_steps"):
        assert sum(getattr(each, name) for each in accounts) == getattr(planner.spent, name) > 0
    assert all(each.paused_steps <= each.steps < each.rows < 8 * each.steps for each in accounts)


def test_without_a_draft_nothing_is_drafted_and_the_text_is_the_same(loop, asked, monkeypatch):
    planner = loop.worker._planner
    planner.budget = None
    whole = written(loop, asked)
    planner.budget = budget = AtRandom(0)
    monkeypatch.setattr(budget, "who_drafts", lambda ids: [False] * len(ids))
    drafted = []
    monkeypatch.setattr(loop.worker._proposer, "propose", lambda *arguments: drafted.append(arguments))
    assert written(loop, asked) == whole
    assert not drafted


def test_a_paused_requests_draft_goes_on_where_it_would_be(loop, prompt, monkeypatch):
    """Paused for 40 tokens, then drafting: what it drafts is what it drafts without the pause."""
    planner, worker = loop.worker._planner, loop.worker
    proposals: dict[int, list[int]] = {}
    propose = type(worker._proposer).propose

    def note(proposer, anchors, lens, *rest):
        proposal = propose(proposer, anchors, lens, *rest)
        proposals[int(lens[0])] = proposal.tokens[0].tolist()
        return proposal

    monkeypatch.setattr(type(worker._proposer), "propose", note)
    planner.budget = None
    written(loop, [(prompt(50), 80, {})])
    always, proposals = dict(proposals), {}
    planner.budget = budget = AtRandom(1)
    begin = len(prompt(50)) + 40
    depth = []
    monkeypatch.setattr(budget, "who_drafts", lambda ids: [bool(depth) and depth[-1] >= begin] * len(ids))
    opened = type(planner).begin

    def watch(self, ids, lens, info):
        depth.append(int(lens[0]))
        return opened(self, ids, lens, info)

    monkeypatch.setattr(type(planner), "begin", watch)
    written(loop, [(prompt(50), 80, {})])
    both = set(always) & set(proposals)
    assert both and min(proposals) >= begin
    assert {at: proposals[at] for at in both} == {at: always[at] for at in both}
