"""Two tensor-parallel ranks on one machine: right, and batch-invariant in exact mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_k3.models.reference import ReferenceModel
from sglang_k3.testing.server_process import draft_flags
from tests.server.conftest import Model
from tests.server.harness import Server, told
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


@pytest.mark.verify
@pytest.mark.parametrize("rows", ["static", "compact"])
def test_speculation_on_two_ranks_changes_no_bit(
    trained_k3: Model, tmp_path_factory: pytest.TempPathFactory, rows: str
) -> None:
    """Greedy and seeded answers are those of two ranks without a draft. Draws without a seed need every rank
    to draw the same, else the ranks part and the next step hangs."""
    folder = tmp_path_factory.mktemp("ranks")
    draft = trained_k3.path.parent / "tiny-k3-dspark"
    prompts = [ids for ids in trained_k3.prompts if 10 < len(ids) < 400][:4]
    kinds: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.9, "sampling_seed": 5})
    with Server(trained_k3.path, folder / "plain", *FLAGS, "--disable-overlap-schedule") as server:
        want = [told(server.answer(ids, 40, **kind)) for ids in prompts for kind in kinds]
    env = {"SGLANG_RAGGED_VERIFY_MODE": rows}
    with Server(trained_k3.path, folder / "fast", *FLAGS, *draft_flags(draft), env=env) as server:
        assert [told(server.answer(ids, 40, **kind)) for ids in prompts for kind in kinds] == want
        drawn = [server.answer(ids, 64, temperature=1.0) for ids in prompts]
    assert [len(reply["output_ids"]) for reply in drawn] == [64] * len(prompts)
    # A budget may find that drafts of sampled text do not pay.
    steps = 62 if rows == "static" else 63
    assert all(reply["meta_info"]["spec_verify_ct"] <= steps for reply in drawn)
