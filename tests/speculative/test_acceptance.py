"""The rules of acceptance: chains, and the law of what is sampled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from sglang_k3.speculative.acceptance import Accepted, accept_by_rejection, accept_equal, choose_rows
from sglang_k3.speculative.simulated_acceptance import SimulatedAcceptance

DRAWS = 20_000
VOCABULARY = 6


def test_a_chain_ends_at_the_first_difference():
    candidates = torch.tensor([[9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3]])
    chosen = torch.tensor([[1, 2, 3, 7], [1, 2, 8, 7], [5, 2, 3, 7], [1, 5, 3, 7]])
    accepted = accept_equal(candidates, chosen)
    assert accepted.counts.tolist() == [4, 3, 1, 2]
    assert accepted.anchors.tolist() == [7, 8, 5, 5]
    assert accepted.tokens[1, :3].tolist() == [1, 2, 8]


def test_a_limit_cuts_a_run_and_moves_its_anchor():
    accepted = Accepted(torch.tensor([4, 2]), torch.tensor([[1, 2, 3, 7], [1, 5, 0, 0]]))
    cut = accepted.limited(torch.tensor([2, 8]))
    assert cut.counts.tolist() == [2, 2] and cut.anchors.tolist() == [2, 5]


def test_requests_of_one_batch_follow_their_own_rule():
    yes = Accepted(torch.tensor([1, 2]), torch.tensor([[1, 1], [2, 2]]))
    no = Accepted(torch.tensor([3, 4]), torch.tensor([[3, 3], [4, 4]]))
    mixed = choose_rows(torch.tensor([True, False]), yes, no)
    assert mixed.counts.tolist() == [1, 4] and mixed.tokens.tolist() == [[1, 1], [4, 4]]


def test_a_simulated_length_takes_drafts_and_one_token_of_the_target():
    candidates = torch.tensor([[9, 1, 2, 3], [9, 4, 5, 6]])
    chosen = torch.tensor([[1, 2, 3, 7], [0, 0, 8, 0]])
    real = SimulatedAcceptance(3.0, "match-expected", "real-draft-token", torch.tensor)
    accepted = real.accept(candidates, chosen)
    assert accepted.counts.tolist() == [3, 3]
    assert accepted.tokens[:, :3].tolist() == [[1, 2, 3], [4, 5, 8]] and accepted.anchors.tolist() == [3, 8]
    all_of_them = SimulatedAcceptance(9.0, "match-expected", "real-draft-token", torch.tensor)
    assert all_of_them.accept(candidates, chosen).tokens.tolist() == [[1, 2, 3, 7], [4, 5, 6, 0]]
    fixed = SimulatedAcceptance(2.0, "match-expected", "fixed", torch.tensor).accept(candidates, chosen)
    assert fixed.counts.tolist() == [2, 2] and fixed.tokens.eq(100).all()


def test_a_fraction_is_met_on_average():
    torch.manual_seed(1)
    candidates = torch.zeros(1, 8, dtype=torch.int64)
    simulated = SimulatedAcceptance(2.25, "match-expected", "fixed", torch.tensor)
    drawn = [simulated.accept(candidates, candidates).counts.item() for _ in range(400)]
    assert set(drawn) == {2, 3} and 2.15 < sum(drawn) / len(drawn) < 2.35


def test_an_empty_batch_is_accepted_as_nothing():
    nothing = torch.empty(0, 4, dtype=torch.int64)
    assert accept_equal(nothing, nothing).counts.shape == (0,)
    probs = torch.empty(0, 4, 5)
    assert accept_by_rejection(nothing, probs, probs[:, 1:], torch.Generator()).tokens.shape == (0, 4)


def _law(seed: int, rows: int) -> torch.Tensor:
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 1.5
    return logits.softmax(-1)


def _joint(tokens: torch.Tensor) -> torch.Tensor:
    """Counts of each pair of the first two tokens."""
    return torch.bincount(tokens[:, 0] * VOCABULARY + tokens[:, 1], minlength=VOCABULARY**2)


@pytest.mark.parametrize("draft_kind", ["stochastic", "greedy", "unlike", "equal", "without overlap"])
@pytest.mark.parametrize("seed", [0, 1])
def test_rejection_keeps_the_targets_law(draft_kind, seed):
    """The first two tokens of a run, continued by the target where the run was shorter, against p(a) p(b
    | a)."""
    generator = torch.Generator().manual_seed(seed)
    first, after = _law(seed, 1)[0], _law(seed + 10, VOCABULARY)
    draft_first, draft_after = {
        "stochastic": (_law(seed + 20, 1)[0], _law(seed + 30, VOCABULARY)),
        "greedy": (
            torch.nn.functional.one_hot(first.argmax(), VOCABULARY).float(),
            torch.nn.functional.one_hot(after.argmax(-1), VOCABULARY).float(),
        ),
        "unlike": (first.flip(0), after.flip(1)),
        "equal": (first, after),
        "without overlap": (
            torch.nn.functional.one_hot(first.argmin(), VOCABULARY).float(),
            torch.nn.functional.one_hot(after.argmin(-1), VOCABULARY).float(),
        ),
    }[draft_kind]
    d0 = torch.multinomial(draft_first.expand(DRAWS, -1), 1, generator=generator)[:, 0]
    q1 = draft_after[d0]
    d1 = torch.multinomial(q1, 1, generator=generator)[:, 0]
    candidates = torch.stack([torch.zeros_like(d0), d0, d1], 1)
    target = torch.stack([first.expand(DRAWS, -1), after[d0], after[d1]], 1)
    draft = torch.stack([draft_first.expand(DRAWS, -1), q1], 1)
    accepted = accept_by_rejection(candidates, target, draft, generator)
    tokens = accepted.tokens[:, :2].clone()
    short = accepted.counts == 1
    tokens[short, 1] = torch.multinomial(after[tokens[short, 0]], 1, generator=generator)[:, 0]
    expected = (first.unsqueeze(1) * after).flatten().double()
    expected = expected / expected.sum() * DRAWS
    assert chisquare(_joint(tokens).double(), expected).pvalue > 1e-3
    if draft_kind == "equal":
        assert (accepted.counts == 3).all()
    if draft_kind == "unlike":
        assert short.float().mean() > 0.2


@pytest.mark.parametrize("seed", [0, 1])
def test_the_equal_rule_keeps_the_law_of_the_sampler_behind_it(seed):
    generator = torch.Generator().manual_seed(seed)
    first, after = _law(seed, 1)[0], _law(seed + 10, VOCABULARY)
    draft = first.argmax().expand(DRAWS)
    chosen = torch.stack(
        [
            torch.multinomial(first.expand(DRAWS, -1), 1, generator=generator)[:, 0],
            torch.multinomial(after[draft], 1, generator=generator)[:, 0],
        ],
        1,
    )
    accepted = accept_equal(torch.stack([torch.zeros_like(draft), draft], 1), chosen)
    tokens = accepted.tokens.clone()
    short = accepted.counts == 1
    tokens[short, 1] = torch.multinomial(after[tokens[short, 0]], 1, generator=generator)[:, 0]
    expected = (first.unsqueeze(1) * after).flatten().double()
    assert chisquare(_joint(tokens).double(), expected / expected.sum() * DRAWS).pvalue > 1e-3
    assert 0.1 < short.float().mean() < 0.9


@given(seed=st.integers(0, 1000), rows=st.integers(1, 8), requests=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_rejected_drafts_are_never_emitted_where_the_target_gives_them_nothing(seed, rows, requests):
    generator = torch.Generator().manual_seed(seed)
    target = torch.rand(requests, rows + 1, VOCABULARY, generator=generator)
    target[:, :, 0] = 0
    target /= target.sum(-1, keepdim=True)
    candidates = torch.zeros(requests, rows + 1, dtype=torch.int64)
    draft = torch.zeros(requests, rows, VOCABULARY)
    draft[:, :, 0] = 1
    accepted = accept_by_rejection(candidates, target, draft, generator)
    assert (accepted.counts == 1).all() and (accepted.tokens[:, 0] != 0).all()
