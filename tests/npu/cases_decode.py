"""Tiers (b) and (c) without drafts: a decode step, hits, and one chunked prompt against the whole one.

Not proven here: see cases_serving.py.
"""

from __future__ import annotations

import pytest

from tests.npu import workload
from tests.npu.declared import report, undeclared
from tests.npu.workload import FLAGS


@pytest.fixture(scope="module")
def loop(emulator, model: str):
    from sglang_k3.testing.loop import Loop

    return Loop("--model-path", model, *FLAGS, device="npu")


def test_a_hit_gives_the_cold_runs_tokens(loop, model):
    (ids,) = workload.prompts(model)[4:5]
    cold = loop.admit("cold", ids, 8)
    loop.finish(cold)
    hit = loop.admit("hit", ids, 8)
    loop.finish(hit)
    assert cold.cached_tokens == 0 and hit.cached_tokens >= 64
    assert list(hit.output_ids) == list(cold.output_ids)


def test_the_state_layout_knows_nothing_of_drafts(loop):
    pool = loop.worker.model_runner.req_to_token_pool.mamba_pool
    assert pool.mamba_cache.conv[0].shape[2] == 3 and pool.mamba_cache.temporal.dim() == 5


def test_a_decode_asks_the_host_for_nothing_undeclared(loop, emulator, model, capsys):
    requests = [loop.admit(f"d{n}", ids, 20) for n, ids in enumerate(workload.prompts(model)[:3])]
    loop.step(4)
    temporal = loop.worker.model_runner.req_to_token_pool.mamba_pool.mamba_cache.temporal
    for _ in range(3):
        with emulator.logging() as log:
            log.watch("state", temporal)
            loop.step()
        assert log.launches > 200
        assert undeclared(log) == [], report(log)
        assert max(note.bytes for note in log.results) < temporal[0].nbytes, "a pool-sized tensor was made"
        # Each layer's states of the running requests, once; a step at a boundary keeps as many more.
        once = temporal.shape[0] * len(requests) * temporal[0, 0].nbytes
        assert log.stored["state"] in (once, 2 * once)
    with capsys.disabled():
        print("\na decode step,", report(log))
    loop.finish(*requests)


def test_the_scheduler_writes_its_tables_behind_a_step_that_reads_them(loop, emulator, model):
    """SGLang has the barrier on CUDA alone; on an NPU we switch it on."""
    prompts = [ids[: 40 + 9 * n] for n, ids in enumerate(workload.prompts(model)[:8:2])]

    def races(name: str, drop: str | None) -> tuple[list[str], list[str]]:
        with emulator.held_back(0, drop=drop) as streams:
            requests = [loop.admit(f"{name}{n}", ids, 6) for n, ids in enumerate(prompts)]
            loop.finish(*requests)
        return streams.races, [line for line in streams.waits if "_apply_war_barrier" in line]

    found, barriers = races("ordered", None)
    assert found == [] and barriers
    found, _ = races("loose", barriers[0])
    assert found and all("writes what" in race and "ascend_metadata.py" in race for race in found)
