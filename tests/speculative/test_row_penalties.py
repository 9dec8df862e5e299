"""Penalties on drafted rows are those that plain decoding would have applied one token later."""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_k3 import upstream
from sglang_k3.speculative import row_penalties
from sglang_k3.speculative.row_penalties import RowPenalties

VOCABULARY = 12
KINDS = {
    "frequency": {"frequency_penalty": 0.3},
    "presence": {"presence_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.7},
    "minimum": {"min_new_tokens": 4},
    "all": {
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.3,
        "min_new_tokens": 3,
    },
}


def request(rid, **sampling):
    return SimpleNamespace(
        rid=rid,
        output_ids=[],
        sampling_params=SamplingParams(**sampling),
        eos_token_ids={11},
        tokenizer=SimpleNamespace(eos_token_id=11, additional_stop_token_ids=None),
    )


def plainly(req, tokens, logits):
    """The penalised logits of a request that has written `tokens`, by SGLang's penalisers alone."""
    batch: Any = row_penalties._Batch(reqs=[req], device="cpu")
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(VOCABULARY, batch, row_penalties._PENALIZERS)
    for token in tokens:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    logits = logits.clone().unsqueeze(0)
    orchestrator.apply(logits)
    return logits[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_rows_and_the_next_step_see_what_was_accepted_before_them(kind, count):
    free, bound = request("free"), request("bound", **KINDS[kind])
    reqs = [free, bound]
    penalties = RowPenalties(VOCABULARY, "cpu")
    penalties.begin(reqs, torch.tensor([3, 4]))
    candidates = torch.tensor([[3, 1, 1, 2], [4, 1, 1, 2]])
    start = torch.randn(2, 4, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits = start.clone()
    penalties.apply(reqs, logits, candidates)
    assert torch.equal(logits[0], start[0])
    for row in range(4):
        written = [4, 1, 1, 2][: row + 1]
        assert torch.equal(logits[1, row], plainly(bound, written, start[1, row])), row
    assert not torch.equal(logits[1], start[1])
    # `count` tokens are committed: the drafts before the last, and a bonus that no row has seen.
    anchors = torch.tensor([9, 9])
    penalties.accept(reqs, torch.tensor([count, count]), anchors)
    written = [4, *[1, 1, 2][: count - 1], 9]
    following = start[:, :1].clone()
    penalties.apply(reqs, following, anchors.unsqueeze(1))
    assert torch.equal(following[1, 0], plainly(bound, written, start[1, 0]))


def test_a_resumed_request_starts_from_its_output_so_far():
    bound = request("bound", **KINDS["all"])
    bound.output_ids = [1, 2, 1]
    penalties = RowPenalties(VOCABULARY, "cpu")
    penalties.begin([bound], torch.tensor([6]))
    logits = torch.randn(1, 1, VOCABULARY)
    want = plainly(bound, [1, 2, 1, 6], logits[0, 0])
    penalties.apply([bound], logits, torch.tensor([[6]]))
    assert torch.equal(logits[0, 0], want)


def test_a_forgotten_request_is_not_penalised_any_more():
    bound = request("bound", **KINDS["frequency"])
    penalties = RowPenalties(VOCABULARY, "cpu")
    penalties.begin([bound], torch.tensor([6]))
    penalties.forget("bound")
    logits = torch.zeros(1, 1, VOCABULARY)
    penalties.apply([bound], logits, torch.tensor([[6]]))
    assert not logits.any()


@pytest.mark.parametrize("kinds", list(itertools.permutations(row_penalties._PENALIZERS)), ids=range(24))
def test_penalties_are_added_in_one_order_whatever_the_process_hands_over(kinds):
    """A set of classes has another order in every process; sums of floats have another last bit."""
    batch: Any = row_penalties._Batch(
        reqs=[request("one", frequency_penalty=0.6, presence_penalty=0.3)], device="cpu"
    )
    orchestrator: Any = object.__new__(penaltylib.BatchedPenalizerOrchestrator)
    original = inspect.unwrap(penaltylib.BatchedPenalizerOrchestrator.__init__)
    upstream._order_penalties(original, orchestrator, 200, batch, kinds)
    orchestrator.cumulate_output_tokens(torch.tensor([0]))
    before = torch.randn(1, 200, generator=torch.Generator().manual_seed(2))
    sums = []
    for value in before[0]:
        logits = torch.zeros(1, 200)
        logits[0, 0] = value
        orchestrator.apply(logits)
        sums.append(logits[0, 0])
    want = before[0] - 0.6 - 0.3
    assert not torch.equal(want, before[0] - 0.3 - 0.6)
    assert torch.equal(torch.stack(sums), want)
