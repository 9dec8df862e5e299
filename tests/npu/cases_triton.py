"""Our Triton kernels serve with drafts on the emulated NPU, in Triton's interpreter: prefill, verify, commit.

Not proven here: see cases_serving.py; nor anything of the compiled kernels (tests/kernels/triton/).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu import interpreted, table, workload


@pytest.fixture(scope="module")
def loop(emulator, model: str) -> Any:
    return interpreted.serve(emulator, model, *workload.SPECULATION)


def test_requests_with_drafts_and_hits_give_the_cpu_servers_tokens(loop, model):
    served = workload.run(loop, workload.prompts(model)[: interpreted.REQUESTS], retract=False)
    got = workload.tokens(served)
    assert got == workload.on_cpu(model, interpreted.REQUESTS)
    assert len({tuple(tokens) for tokens in got}) > 1
    assert [len(request.origin_input_ids) for request in served] == [89, 112, 135]
    assert sum(request.cached_tokens > 0 for request in served) >= 1
    assert sum(request.spec_verify_ct for request in served) < 0.8 * sum(map(len, got))


def test_every_operator_that_has_a_triton_kernel_is_served_by_it(loop):
    chosen = interpreted.chosen()
    ours = {operator for operator, names in chosen.items() if names == {"triton"}}
    assert ours == table.INTERPRETED
    assert not [operator for operator, names in chosen.items() if len(names) > 1]


def test_a_verify_asks_the_host_for_nothing_undeclared(loop, emulator, model):
    interpreted.quiet_step(loop, emulator, model)


def test_doctor_says_that_ours_come_first_and_where_there_is_none(loop):
    from sglang_k3 import doctor

    right, told = doctor._order()
    start, _, without = told.partition(" there is none of ")
    assert right and start == "SGLANG_K3_KERNELS=triton: our Triton kernels first;"
    assert not table.INTERPRETED & set(without.split(", "))
    assert {"kda.gate", "linear", "moe.experts"} <= set(without.split(", "))
    for operator in table.INTERPRETED:
        for name, call in doctor._calls().items():
            choice = doctor._choose(operator, name, call)
            assert choice.implementation == "triton" and choice.refusals == () and choice.behind
