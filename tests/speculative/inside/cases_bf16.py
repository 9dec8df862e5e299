"""A bf16 target and its trained draft in the fast mode: right up to rounding."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from sglang_k3.models.reference import ReferenceModel
from sglang_k3.training import tokenizer as bpe
from sglang_k3.training.dataset import SEPARATOR
from tests.speculative.inside.cases_commit import forced, prefilled, state_of
from tests.speculative.inside.conftest import TINY

MARGIN = 0.5
"""Of logits; bf16 layers move them by a few tenths."""

HEADS = (
    "def read_lines(path):\n    ",
    "import os\nimport sys\n\n\ndef main(argv=None):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_are_accepted_and_greedy_tokens_are_the_reference_models(loop, temperature):
    tokenizer = bpe.load(TINY)
    prompts = [[SEPARATOR, *tokenizer.encode(head).ids] for head in HEADS]
    requests = [
        loop.admit(f"head {number} {temperature}", ids, 40, temperature=temperature)
        for number, ids in enumerate(prompts)
    ]
    loop.finish(*requests)
    assert all(len(request.output_ids) == 40 for request in requests)
    assert sum(request.spec_verify_ct for request in requests) < 2 * 39
    if temperature > 0:
        return
    oracle = ReferenceModel.from_checkpoint(TINY, torch.float64)
    compared = 0
    for ids, request in zip(prompts, requests, strict=True):
        output = list(request.output_ids)
        logits = oracle.forward([*ids, *output[:-1]])[len(ids) - 1 :]
        behind = logits.amax(-1) - logits[torch.arange(40), output]
        assert behind.max() < MARGIN
        compared += int((behind == 0).sum())
    assert compared >= 100


def test_states_behind_forced_runs_are_a_prefills_up_to_rounding(loop, prompt):
    ids = prompt(70, 3)
    request = loop.admit("forced", ids, 60)
    forced(loop, cycle([[3], [8], [1], [5]]))
    while len(request.output_ids) < 30:
        loop.step()
    found = state_of(loop, request)
    del loop.worker._accept
    loop.finish(request)
    text = [*ids, *request.output_ids]
    # Between two turns a step may be under way, whose tokens are in the state already.
    depths = range(len(ids) + 20, len(ids) + 48)
    apart = [max(map(distance, found, prefilled(loop, text[:depth], f"to {depth}"))) for depth in depths]
    assert sorted(apart)[0] < 0.03 and sorted(apart)[1] > 0.1


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())
