"""One scheduler for all cases of a process: SGLang keeps one configuration a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_k3.speculative.record_forms import chosen
from sglang_k3.testing.loop import Loop
from sglang_k3.testing.random_draft import draft_config, draft_tensors, write_draft
from sglang_k3.testing.server_process import draft_flags
from tests.inside import STRATEGIES, prompt_of

collect_ignore = [] if chosen().anchored else ["cases_anchors.py"]

TINY = Path(__file__).parents[3] / "examples" / "tiny-k3"


@pytest.fixture(scope="session")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    """The trained tiny target in exact mode with a random draft: whatever is accepted, texts are the
    target's."""
    config = draft_config(
        hidden_size=192,
        vocab_size=2048,
        target_layers=5,
        taps=[0, 2, 4],
        mask_token=2045,
        max_positions=16384,
    )
    draft = write_draft(tmp_path_factory.mktemp("draft"), config, draft_tensors(config))
    return Loop(
        *("--model-path", str(TINY), "--dtype", "float32", "--enable-deterministic-inference"),
        *("--max-running-requests", "6", "--max-mamba-cache-size", "40", "--max-total-tokens", "4096"),
        *("--chunked-prefill-size", "128"),
        *draft_flags(draft),
        *STRATEGIES[os.environ["K3_STRATEGY"]],
    )


@pytest.fixture(autouse=True)
def clean(loop: Loop):
    """Each case starts from an empty cache and leaves no request behind."""
    loop.flush()
    planner = loop.worker._planner
    budget = planner.budget
    yield
    for replaced in ("_accept", "_propose"):
        loop.worker.__dict__.pop(replaced, None)
    planner.budget = budget
    for request in list(loop.scheduler.running_batch.reqs) + list(loop.scheduler.waiting_queue):
        loop.abort(request.rid)
    loop.step(5)


@pytest.fixture
def prompt():
    return prompt_of
