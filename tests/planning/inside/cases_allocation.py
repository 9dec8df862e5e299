"""A scheduler started with the flags that the planner printed allocates what the planner said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_k3.planning.memory import CHECKPOINTS, DRAFT_PAGES, MLA_PAGES, RECORDS, STATES, TABLE
from sglang_k3.planning.report import Plan, flags
from sglang_k3.planning.weights import COPIES, DRAFT
from sglang_k3.testing.loop import Loop
from tests.planning.plans import planned
from tests.planning.weights_probe import tensors

EXAMPLES = Path(__file__).parents[3] / "examples"
WITHIN = 0.02


@pytest.fixture(scope="session")
def found() -> Plan:
    tiny, draft = EXAMPLES / "tiny-k3", EXAMPLES / "tiny-k3-dspark"
    return planned(
        "cpu",
        5,
        model_path=tiny,
        draft=str(draft),
        records=os.environ["SGLANG_K3_RECORDS"],
        cache_strategy=os.environ["K3_STRATEGY"],
        context=1000,
        cached_tokens=300,
        chunk=128,
    )


@pytest.fixture(scope="session")
def loop(found: Plan) -> Loop:
    environment, given = flags(found)
    assert environment == {"SGLANG_K3_RECORDS": os.environ["SGLANG_K3_RECORDS"]}
    place = given.index("DRAFT")
    given[place] = str(EXAMPLES / "tiny-k3-dspark")
    return Loop(*given)


def bytes_of(*held: Any) -> int:
    """Of tensors, each counted once."""
    return sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in held}.values())


def close(planned_bytes: int, allocated: int) -> bool:
    return allocated > 0 and abs(planned_bytes / allocated - 1) < WITHIN


def test_the_target_and_its_derived_copies(loop: Loop, found: Plan) -> None:
    model = loop.scheduler.tp_worker.model_runner.model
    parameters = bytes_of(*model.parameters())
    held = found.memory.weights
    assert close(sum(size for name, size in held.items() if name not in (COPIES, DRAFT)), parameters)
    assert close(held[COPIES], bytes_of(*tensors(model).values()) - parameters)


def test_the_draft(loop: Loop, found: Plan) -> None:
    target = loop.scheduler.tp_worker.model_runner.model
    shared = {id(tensor) for tensor in tensors(target).values()}
    own = [tensor for tensor in tensors(loop.worker.draft_model).values() if id(tensor) not in shared]
    assert close(found.memory.weights[DRAFT], bytes_of(*own))


def test_pages_of_both_caches(loop: Loop, found: Plan) -> None:
    pools = found.memory.pools
    target = loop.scheduler.token_to_kv_pool_allocator.get_kvcache()
    assert close(pools[MLA_PAGES], bytes_of(*target.full_kv_pool.kv_buffer))
    draft = loop.worker.draft_model_runner.token_to_kv_pool
    assert close(pools[DRAFT_PAGES], bytes_of(*draft.k_buffer, *draft.v_buffer))
    assert loop.scheduler.max_total_num_tokens == found.memory.counts.tokens


def test_state_slots_and_their_number(loop: Loop, found: Plan) -> None:
    pool = loop.scheduler.req_to_token_pool
    cache = pool.mamba_pool.mamba_cache
    pools, counts = found.memory.pools, found.memory.counts
    assert close(pools[STATES] + pools[CHECKPOINTS], bytes_of(*cache.conv, cache.temporal))
    assert cache.temporal.shape[1] == counts.slots + 1
    assert loop.scheduler.max_running_requests == counts.requests
    assert close(pools[TABLE], pool.req_to_token.nbytes)


def test_the_slots_of_a_request_are_those_that_sglang_reckons_with(loop: Loop, found: Plan) -> None:
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    reckoner: Any = KVCacheConfigurator.__new__(KVCacheConfigurator)
    reckoner.mambaish_config = mambaish_config(loop.scheduler.model_config)
    reckoner.spec_algorithm = loop.scheduler.spec_algorithm
    assert reckoner._calculate_mamba_ratio() == found.memory.counts.slots_per_request


def test_replay_records(loop: Loop, found: Plan) -> None:
    records = loop.scheduler.req_to_token_pool.mamba_pool.records
    banks = [records.u, records.k, records.g, records.x]
    if records.windows is not None:
        banks.append(records.windows)
    assert all(isinstance(bank, torch.Tensor) for bank in banks)
    assert close(found.memory.pools[RECORDS], bytes_of(*banks))
