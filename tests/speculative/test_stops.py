"""Where an accepted run ends."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_k3.speculative.stops import RunLimits, stop_tokens


def request(rid="a", prompt=10, new=100, eos=(5,), stops=(), ignore=False, tokenizer=None):
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[0] * prompt,
        eos_token_ids=set(eos),
        tokenizer=tokenizer,
        sampling_params=SimpleNamespace(
            max_new_tokens=new, ignore_eos=ignore, stop_token_ids=set(stops) or None
        ),
    )


def test_stop_tokens_are_those_of_sglangs_own_check():
    tokenizer = SimpleNamespace(eos_token_id=7, additional_stop_token_ids={8})
    assert stop_tokens(request(stops=(3,), tokenizer=tokenizer)) == {3, 5, 7, 8}
    assert stop_tokens(request(stops=(3,), ignore=True)) == set()
    assert stop_tokens(
        request(tokenizer=SimpleNamespace(eos_token_id=None, additional_stop_token_ids=None))
    ) == {5}


def test_a_run_ends_with_its_first_stop_token():
    limits = RunLimits()
    tokens = torch.tensor([[1, 5, 5, 9], [1, 2, 3, 4], [5, 0, 0, 0]])
    reqs = [request("a"), request("b", eos=(77,)), request("c")]
    assert limits.of(reqs, torch.tensor([10, 10, 10]), tokens).tolist() == [2, 4, 1]


def test_a_run_ends_with_the_last_token_a_request_may_have():
    # A prompt of 10 and 5 new tokens: the last new one is never an input, so the state ends at 14.
    limits = RunLimits()
    reqs, tokens = [request(new=5, ignore=True)], torch.zeros(1, 8, dtype=torch.int64)
    for depth, most in ((10, 4), (11, 3), (13, 1), (14, 1)):
        assert limits.of(reqs, torch.tensor([depth]), tokens).tolist() == [most]


def test_another_batch_is_asked_anew():
    limits = RunLimits()
    tokens = torch.tensor([[4, 5, 6]])
    assert limits.of([request("a", eos=(4,))], torch.tensor([10]), tokens).tolist() == [1]
    assert limits.of([request("b", eos=(6,))], torch.tensor([10]), tokens).tolist() == [3]
    assert limits.of([request("a", eos=(5,), prompt=11)], torch.tensor([11]), tokens).tolist() == [2]


def test_no_requests_have_no_limits():
    empty = torch.empty(0, dtype=torch.int64)
    assert RunLimits().of([], empty, torch.empty(0, 8, dtype=torch.int64)).shape == (0,)
