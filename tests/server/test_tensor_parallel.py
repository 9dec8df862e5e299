"""Two tensor-parallel ranks on one machine: right, and batch-invariant in exact mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_k3.models.reference import ReferenceModel
from tests.server.harness import Server
from tests.server.margin import check

NEW_TOKENS = 8
FLAGS = ("--dtype", "float32", "--enable-deterministic-inference", "--page-size", "16", "--tp-size", "2")
FLAGS += ("--max-total-tokens", "8192", "--max-mamba-cache-size", "60")


@pytest.mark.parametrize(
    "split",
    [
        pytest.param((), id="tp 2", marks=pytest.mark.verify),
        pytest.param(("--ep-size", "2"), id="tp 2, ep 2"),
    ],
)
def test_two_ranks_give_the_reference_models_tokens_and_one_answer_to_the_bit(
    split: tuple[str, ...], packed_k3: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    chosen = [prompt for prompt in prompts if len(prompt) <= 333]
    with Server(packed_k3, tmp_path / "log", *FLAGS, *split) as server:
        alone = server.generate_all(chosen, NEW_TOKENS, at_once=1)
        server.flush()
        together = server.generate_all(chosen, NEW_TOKENS, at_once=8)
    for single, other in zip(alone, together, strict=True):
        assert other.ids == single.ids
        assert other.logprobs == single.logprobs
    oracle = ReferenceModel.from_checkpoint(packed_k3, torch.float64)
    verdicts = [
        check(oracle, prompt, reply.ids, reply.logprobs) for prompt, reply in zip(chosen, alone, strict=True)
    ]
    assert [verdict.wrong for verdict in verdicts] == [()] * len(verdicts)
    assert max(verdict.largest_logprob_error for verdict in verdicts) < 1e-3
