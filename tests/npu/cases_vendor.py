"""Tiers (b) and (c) on an emulated Ascend 950: packed MXFP4 experts, and attention by torch_npu's fused-infer
operator, whose sizes the tiny model has not: its refusal is lifted here, and with it that of float32.

Not proven here: see cases_serving.py; nor that CANN's kernels take those sizes.
"""

from __future__ import annotations

import os

# Read when torch_npu first asks for the device.
os.environ["K3_FAKE_SOC"] = "Ascend950PR_9579"

from dataclasses import replace
from typing import Any

import pytest

from tests.npu import table, workload
from tests.npu.declared import report, undeclared
from tests.npu.workload import FLAGS, ROOT, SPECULATION

MODEL = str(ROOT / "examples" / "tiny-k3")
REQUESTS = 5
PAGES = ("--page-size", "128", "--chunked-prefill-size", "128", "--mamba-track-interval", "128")


@pytest.fixture(scope="module")
def loop(emulator) -> Any:
    from sglang_k3.kernels import registry
    from sglang_k3.testing.loop import Loop

    entries = {entry.name: entry for entry in registry.implementations("mla.paged_attention")}
    fused = entries["torch_npu npu_fused_infer_attention_score_v2"]
    at = registry._implementations["mla.paged_attention"].index(fused)
    registry._implementations["mla.paged_attention"][at] = replace(fused, supports=lambda call: None)
    return Loop("--model-path", MODEL, *FLAGS, *PAGES, *SPECULATION, device="npu")


@pytest.fixture(scope="module")
def served(loop) -> list[Any]:
    return workload.run(loop, workload.prompts(MODEL)[:REQUESTS], retract=False)


def test_packed_experts_and_fused_attention_give_the_cpu_servers_tokens(served):
    assert workload.tokens(served) == workload.on_cpu(MODEL, REQUESTS)
    assert sum(request.spec_verify_ct for request in served) < 0.8 * REQUESTS * workload.NEW_TOKENS


def test_the_table_of_operators_says_what_served(served):
    assert table.chosen() - table.SERVED == table.SERVED_ON_A_950


def test_lengths_cost_one_copy_a_step_and_one_wait(loop, emulator):
    requests = [loop.admit(f"v{n}", ids, 40) for n, ids in enumerate(workload.prompts(MODEL)[:3])]
    loop.step(6)
    for _ in range(3):
        with emulator.logging() as log:
            loop.step()
        assert undeclared(log) == [], report(log)
        ours = [note for note in (*log.copies, *log.waits) if "ascend_lengths.py" in note.where]
        assert [(note.kind, note.what) for note in ours] == [("copy", "to host, async"), ("sync event", "")]
        assert ours[0].bytes == 2 * len(requests) * 8
    loop.finish(*requests)


def test_doctor_says_what_an_operator_takes_from_the_host(loop):
    import torch

    from sglang_k3 import doctor
    from sglang_k3.kernels.registry import Call

    shown = doctor._choose("mla.paged_attention", "bf16", Call("npu", torch.bfloat16)).implementation
    assert shown is not None and shown.endswith(
        "(takes from the host: each request's lengths, one copy a step)"
    )


def test_experts_with_quantised_rows_stay_near(loop, served, capsys):
    """Both products by npu_grouped_matmul on packed weights, rows in MXFP8: what a bfloat16 model runs."""
    from sglang_k3.kernels.moe import ascend_mx
    from sglang_k3.moe.experts import Experts

    experts = [m for m in loop.worker.model_runner.model.modules() if isinstance(m, Experts)]
    assert experts
    for one in experts:
        one.run = ascend_mx.experts_quantised
    loop.flush()
    rounded = workload.run(loop, workload.prompts(MODEL)[:REQUESTS], "rounded", retract=False)
    exact = [token for request in workload.tokens(served) for token in request]
    near = [token for request in workload.tokens(rounded) for token in request]
    same = sum(a == b for a, b in zip(exact, near, strict=True)) / len(exact)
    with capsys.disabled():
        print(f"\n{same:.0%} of {len(exact)} greedy tokens stay with rows in MXFP8")
    assert same >= 0.6
