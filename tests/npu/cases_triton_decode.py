"""Our Triton kernels serve without drafts on the emulated NPU, in Triton's interpreter: prefill and decode.

Not proven here: see cases_triton.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu import interpreted, table, workload


@pytest.fixture(scope="module")
def loop(emulator, model: str) -> Any:
    return interpreted.serve(emulator, model)


def test_requests_and_hits_give_the_cpu_servers_tokens(loop, model):
    served = workload.run(loop, workload.prompts(model)[: interpreted.REQUESTS], retract=False)
    assert workload.tokens(served) == workload.on_cpu(model, interpreted.REQUESTS)
    assert sum(request.cached_tokens > 0 for request in served) >= 1


def test_decode_is_served_by_triton_kernels(loop):
    chosen = interpreted.chosen()
    ours = {operator for operator, names in chosen.items() if names == {"triton"}}
    assert ours | {"kda.commit", "short_conv.commit", "acceptance.chain"} == table.INTERPRETED
    assert {"kda.decode", "short_conv.decode"} <= ours


def test_a_decode_asks_the_host_for_nothing_undeclared(loop, emulator, model):
    interpreted.quiet_step(loop, emulator, model)
