"""Tiers (b) and (c): SGLang's scheduler serves the tiny Kimi K3 with drafts on the emulated NPU.

Not proven here: any number, time or race of a real device; more than one rank; graphs; padded batches, which
only graphs and data parallelism make (their rows are covered operator by operator in
tests/kernels/test_ascend_kernels.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu import workload
from tests.npu.declared import report, undeclared


@pytest.fixture(scope="module")
def loop(speculating) -> Any:
    return speculating


def test_our_classes_serve_and_no_state_has_a_draft_dimension(loop):
    from sglang_k3.attention_backends.ascend import AscendHybridBackend
    from sglang_k3.attention_backends.ascend_records import DeviceRecords
    from sglang_k3.speculative.dspark_worker import K3DSparkWorker

    assert isinstance(loop.worker, K3DSparkWorker)
    worker: Any = loop.worker
    assert isinstance(worker.attn_backend, AscendHybridBackend)
    pool = worker.model_runner.req_to_token_pool.mamba_pool
    assert isinstance(pool.records, DeviceRecords) and pool.records.u.device.type == "npu"
    assert pool.mamba_cache.temporal.dim() == 5 and pool.mamba_cache.conv[0].shape[2] == 3
    assert "plain" in pool.records.form.name


def test_thirty_requests_give_the_cpu_servers_tokens(loop, model):
    requests = workload.run(loop, workload.prompts(model))
    got = workload.tokens(requests)
    assert len(got) == workload.REQUESTS and got == workload.on_cpu(model)
    assert len({tuple(tokens) for tokens in got}) > 20
    assert sum(request.cached_tokens > 0 for request in requests) >= 20
    assert sum(request.retraction_count for request in requests) >= 1
    # Fewer verifies than tokens: drafts were accepted.
    assert sum(request.spec_verify_ct for request in requests) < 0.8 * sum(map(len, got))


def test_a_verify_asks_the_host_for_nothing_undeclared(loop, emulator, model, capsys):
    requests = [loop.admit(f"v{n}", ids, 40) for n, ids in enumerate(workload.prompts(model)[:4])]
    loop.step(6)
    temporal = loop.worker.model_runner.req_to_token_pool.mamba_pool.mamba_cache.temporal
    for _ in range(3):
        with emulator.logging() as log:
            loop.step()
        assert log.launches > 500
        assert undeclared(log) == [], report(log)
        assert not [note for note in log.copies if "async" not in note.what], report(log)
        assert max(note.bytes for note in log.results) < temporal[0].nbytes, "a pool-sized tensor was made"
    with capsys.disabled():
        print("\na verify step,", report(log))
    loop.finish(*requests)


def test_the_table_of_operators_says_what_served(loop):
    from tests.npu import table

    assert table.chosen() == table.SERVED
    assert table.TARGET.read_text() == table.text()
