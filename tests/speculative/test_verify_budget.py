"""The budget: its two estimates, the solver over both, and who is paused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_k3.speculative import verify_budget
from sglang_k3.speculative.step_times import StepTimes
from sglang_k3.speculative.verify_budget import Experts, VerifyBudget, Work

ROWS = 8


class Fixed(StepTimes):
    """Times that are known and do not change."""

    def __init__(self, *milliseconds: float) -> None:
        super().__init__(len(milliseconds))
        self.coefficients = np.array(milliseconds) * 1e-3

    def observe(self, features, seconds) -> None:
        pass


def known(*, step=10.0, row=1.0, expert=0.0, read=0.0, draft=2.0, drafting=0.1, rows=ROWS, experts=None):
    """A budget that knows these milliseconds: of a step, a row, an expert touched, 1,000 tokens read by a
    row, a draft, and a request in it."""
    budget = VerifyBudget(rows, experts)
    budget.verify_times, budget.draft_times = (
        Fixed(step, row, expert, read, 0.0),
        Fixed(draft, drafting, 0.0, 0.0),
    )
    budget._explored = verify_budget._EXPLORED_STEPS
    return budget


def chances(*each: float, rows: int = ROWS) -> np.ndarray:
    return np.repeat(np.array(each)[:, None], rows - 1, 1)


def step(budget, ids, each, accept=None, context=1000):
    """One step in which each request's drafts have these chances, and accept as many (as expected if None).
    Returns who drafted and the rows."""
    drafted = budget.who_drafts(ids)
    decision = budget.decide(ids, drafted, chances(*each), context)
    counts = [
        min(rows, 1 + round(expected if accept is None else accept))
        for rows, expected in zip(decision.rows, decision.expected, strict=True)
    ]
    work = Work(len(ids), context)
    verify = float(budget.verify_seconds(work, np.array([sum(decision.rows)]))[0])
    draft = budget.draft_seconds(work, sum(drafted))
    budget.observe(ids, decision, counts, context, sum(drafted), draft, verify)
    return drafted, decision.rows


def test_times_find_what_a_step_is_made_of():
    times, draw = StepTimes(4), np.random.default_rng(0)
    made_of = np.array([8e-3, 4e-4, 2e-4, 1e-4])
    for _ in range(400):
        rows = float(draw.integers(1, 64))
        features = np.array([1.0, rows, 128 * (1 - (1 - 8 / 128) ** rows), rows * draw.uniform(0.1, 4)])
        times.observe(features, float(features @ made_of) * draw.normal(1, 0.02))
    for rows in (1.0, 4.0, 16.0, 64.0):
        features = np.array([1.0, rows, 128 * (1 - (1 - 8 / 128) ** rows), rows])
        assert times(features) == pytest.approx(features @ made_of, rel=0.05)


def test_times_that_were_never_told_apart_are_shared_and_never_negative():
    times = StepTimes(3)
    for _ in range(50):
        times.observe([1.0, 8.0, 16.0], 5e-3)
    assert (times.coefficients >= 0).all()
    assert times(np.array([1.0, 8.0, 16.0])) == pytest.approx(5e-3, rel=1e-3)


def test_times_follow_a_machine_that_becomes_slower():
    times = StepTimes(2)
    for seconds in (1e-3, 3e-3):
        for i in range(1500):
            times.observe([1.0, i % 8], seconds * (1 + 0.1 * (i % 8)))
    assert times(np.array([1.0, 4.0])) == pytest.approx(3e-3 * 1.4, rel=0.02)


def test_times_of_another_load_are_not_forgotten_while_one_load_lasts():
    """The work of every step of the second load is nearly the same, which says nothing about a row."""
    times, draw = StepTimes(3), np.random.default_rng(2)
    made_of = np.array([1e-2, 2e-4, 1e-3])

    def seen(rows: float, read: float) -> None:
        features = np.array([1.0, rows, rows * read])
        times.observe(features, float(features @ made_of) * draw.normal(1, 0.03))

    for i in range(200):
        seen(float(1 + i % 128), 0.1)
    for i in range(400):
        seen(4.0, 0.1 + 0.001 * (i % 50))
    for rows in (8.0, 32.0, 128.0):
        features = np.array([1.0, rows, rows * 0.1])
        assert times(features) == pytest.approx(features @ made_of, rel=0.15)


def test_kinds_of_steps_that_never_come_again_are_dropped():
    times = StepTimes(2)
    for i in range(200):
        times.observe([1.0, 2.0 ** (i % 100)], 1e-3)
    assert len(times._kinds) == 100
    for _ in range(4000):
        times.observe([1.0, 4.0], 1e-3)
    assert len(times._kinds) == 1 and times(np.array([1.0, 4.0])) == pytest.approx(1e-3, rel=1e-3)


def test_experts_touched_are_those_of_independent_routes():
    experts, draw = Experts(32, 4), np.random.default_rng(1)
    assert experts.touched(np.array(1.0)) == pytest.approx(4)
    for rows in (2, 8, 40):
        seen = [
            len(set(itertools.chain.from_iterable(draw.choice(32, 4, replace=False) for _ in range(rows))))
            for _ in range(600)
        ]
        assert experts.touched(np.array(float(rows))) == pytest.approx(np.mean(seen), rel=0.03)


@given(
    each=st.lists(st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3), min_size=1, max_size=3),
    step_ms=st.floats(0.5, 20),
    row=st.floats(0.05, 5),
    expert=st.floats(0, 1),
)
def test_no_other_number_of_rows_yields_clearly_more_tokens_a_second(each, step_ms, row, expert):
    budget = known(step=step_ms, row=row, expert=expert, rows=4, experts=Experts(16, 2))
    ids = [f"r{i}" for i in range(len(each))]
    found = budget.decide(ids, [True] * len(ids), np.array(each), 500)
    kept = np.cumprod(np.array(each), 1)

    def rate(rows) -> float:
        tokens = sum(1 + kept[n, : count - 1].sum() for n, count in enumerate(rows))
        work = Work(len(ids), 500)
        return float(
            tokens
            / (budget.verify_seconds(work, np.array([sum(rows)]))[0] + budget.draft_seconds(work, len(ids)))
        )

    every = itertools.product(range(1, 5), repeat=len(ids))
    allowed = {len(ids), 4 * len(ids), 1, 2, 3, 4, 5, 6, 7, 8, 10}
    best = max(rate(rows) for rows in every if sum(rows) in allowed)
    assert rate(found.rows) >= (1 - verify_budget._NEARLY) * best * (1 - 1e-9)
    more = [
        rate(rows)
        for rows in itertools.product(range(1, 5), repeat=len(ids))
        if sum(rows) in allowed and sum(rows) > sum(found.rows)
    ]
    assert max(more, default=0.0) < (1 - verify_budget._NEARLY) * best * (1 + 1e-9)


def test_steps_have_few_numbers_of_rows():
    """Kernels are prepared for each."""
    totals = VerifyBudget._totals
    assert totals(1, 7).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert totals(5, 7).tolist() == [5, 6, 7, 8, 10, 12]
    assert totals(9, 0).tolist() == [9]
    assert totals(15, 105).tolist() == [15, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 120]


def test_likely_drafts_get_more_rows_than_unlikely_ones_and_none_beyond_what_was_drafted():
    budget = known(step=30.0, row=1.0)
    rows = budget.decide(["easy", "hard", "none"], [True, True, False], chances(0.95, 0.3, 0.9), 0).rows
    assert rows[0] == ROWS and 1 <= rows[1] <= 3 and rows[2] == 1


def test_the_dearer_a_row_the_fewer_are_verified():
    totals = [
        sum(known(row=row).decide(list("abcd"), [True] * 4, chances(*[0.7] * 4), 0).rows)
        for row in (0.01, 0.5, 2.0, 20.0)
    ]
    assert totals[0] == 32 and totals == sorted(totals, reverse=True) and totals[-1] == 4


def test_first_steps_try_every_number_of_rows():
    budget = VerifyBudget(ROWS, None)
    seen = {tuple(step(budget, ["a", "b"], (0.5, 0.5))[1]) for _ in range(verify_budget._EXPLORED_STEPS)}
    assert seen == {(rows, rows) for rows in range(1, ROWS + 1)}


def test_drafts_that_do_not_pay_are_paused_tried_more_and_more_seldom_and_resumed():
    budget = known(step=10.0, row=3.0, draft=8.0)
    ids = ["a", "b"]
    drafting = [step(budget, ids, (0.05, 0.05))[0] for _ in range(200)]
    steps = [i for i, who in enumerate(drafting) if any(who)]
    paused_from = next(i for i, who in enumerate(drafting) if not any(who))
    trials = [i for i in steps if i > paused_from]
    gaps = np.diff([paused_from - 1, *trials]).tolist()
    assert paused_from <= 3 and gaps[:5] == sorted(gaps[:5]) and gaps[3] >= 4 * gaps[0] and len(trials) <= 6
    budget.verify_times.coefficients[1] = 0.1e-3
    again = [any(step(budget, ids, (0.9, 0.9))[0]) for _ in range(300)]
    resumed = again.index(True)
    assert resumed <= verify_budget._LAST_TRIAL and all(again[resumed:])


def test_one_request_pauses_alone():
    budget = known(step=10.0, row=0.5, draft=0.5, drafting=1.5)
    who = [step(budget, ["easy", "hard"], (0.95, 0.02))[0] for _ in range(30)]
    assert all(easy for easy, _ in who)
    assert 1 <= sum(hard for _, hard in who) < 10


def test_what_neither_pays_nor_costs_switches_nothing():
    """Between the thresholds a paused request stays paused, and another one goes on."""
    budget = known()
    budget._request("drafting")
    budget._request("paused").paused = True
    requests = [budget._request(name) for name in ("paused", "drafting")]
    small = 0.5 * verify_budget._RESUME_GAIN
    drafts = np.array([[small] + [0.0] * 6] * 2)
    budget.verify_times.coefficients[:] = 0
    budget.draft_times.coefficients[:] = 0
    for _ in range(20):
        budget._judge(requests, [True, True], np.array([2, 2]), drafts, 100.0, Work(2, 0))
    assert [request.paused for request in requests] == [True, False]


def test_a_newcomer_waits_where_nobodys_drafts_pay_and_drafts_where_they_do():
    budget = known()
    assert budget.who_drafts(["a"]) == [True]
    assert budget.who_drafts(["a", "b"]) == [True, True]
    for name in ("a", "b"):
        budget._request(name).paused = True
    budget._last_count = 3
    assert budget.who_drafts(["a", "b", "c"]) == [False] * 3
    budget.forget("a")
    budget.forget("b")
    budget.forget("c")
    assert budget.who_drafts(["d"]) == [True]


def test_another_load_is_reason_to_try_again_soon():
    budget = known()
    ids = [f"r{i}" for i in range(16)]
    for name in ids:
        budget._request(name).paused = True
    budget._last_count, budget._until_trial, budget._interval = 16, 100, 128
    assert not any(budget.who_drafts(ids))
    alone = [any(budget.who_drafts(ids[:1])) for _ in range(3)]
    assert any(alone)


def test_a_head_that_is_too_sure_is_believed_less():
    budget = known(step=20.0, row=1.0)
    first = step(budget, ["a"], (0.9,), accept=0)[1]
    for _ in range(20):
        budget._request("a").paused = False
        later = step(budget, ["a"], (0.9,), accept=0)[1]
    assert first == [ROWS] and later[0] <= 3


def test_a_head_that_promises_too_little_is_believed_more():
    """As where it learnt a token's probability, and greedy drafts are accepted for being the likeliest."""
    budget = known(step=10.0, row=1.5)
    first = step(budget, ["a"], (0.5,), accept=7)[1]
    for _ in range(20):
        later = step(budget, ["a"], (0.5,), accept=7)[1]
    assert first[0] <= 4 and later == [ROWS]


def test_a_new_request_begins_with_what_its_like_taught():
    budget = known(step=10.0, row=1.5)
    budget.welcome("a", greedy=True)
    for _ in range(40):
        step(budget, ["a"], (0.5,), accept=7)
    budget.forget("a")
    budget.welcome("greedy", greedy=True)
    budget.welcome("sampled", greedy=False)
    assert budget._request("greedy").trust < 0.5 and budget._request("sampled").trust == 1.0


def test_ended_requests_are_forgotten():
    budget = known()
    step(budget, ["a", "b"], (0.9, 0.9))
    budget.forget("a")
    budget.forget("never seen")
    assert set(budget._requests) == {"b"}


def test_paused_requests_are_counted():
    budget = known()
    budget.decide(["a", "b"], [True, False], chances(0.99, 0.99), 0)
    budget._request("b").paused = True
    assert budget.paused(["a", "b", "gone"]) == 1
