"""One scheduler for all cases of a process: SGLang keeps one configuration a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sglang_k3.kernels.native import native_bf16
from sglang_k3.speculative.record_forms import chosen
from sglang_k3.testing.loop import Loop
from sglang_k3.testing.random_draft import draft_config, draft_tensors, write_draft
from sglang_k3.testing.server_process import draft_flags
from tests.inside import STRATEGIES, prompt_of

DTYPE = os.environ.get("K3_DTYPE", "float32")
"""float32: exact mode and a random draft. bfloat16: the fast mode, and the trained draft."""

collect_ignore = ["cases_bf16.py"] if DTYPE == "float32" else []
collect_ignore += [] if chosen().anchored else ["cases_anchors.py"]

TINY = Path(__file__).parents[3] / "examples" / "tiny-k3"


def pretend_bf16_instructions(present: bool) -> None:
    """torch computes the same products without them, only slowly."""
    for module, name in (
        (torch.cpu, "_is_avx512_bf16_supported"),
        (torch.cpu, "_is_amx_tile_supported"),
        (torch.ops.mkldnn, "_is_mkldnn_bf16_supported"),
    ):
        setattr(module, name, lambda: present)
    native_bf16.cache_clear()


@pytest.fixture(scope="session")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    """The trained tiny target. In exact mode its draft is a random one: whatever is accepted, texts are the
    target's."""
    config = draft_config(
        hidden_size=192,
        vocab_size=2048,
        target_layers=5,
        taps=[0, 2, 4],
        mask_token=2045,
        max_positions=16384,
    )
    draft = TINY.parent / "tiny-k3-dspark"
    if DTYPE == "float32":
        draft = write_draft(tmp_path_factory.mktemp("draft"), config, draft_tensors(config))
    if instructions := os.environ.get("K3_BF16_INSTRUCTIONS"):
        pretend_bf16_instructions(instructions == "yes")
    exact = ("--enable-deterministic-inference",) if DTYPE == "float32" else ()
    return Loop(
        *("--model-path", str(TINY), "--dtype", DTYPE, *exact),
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
