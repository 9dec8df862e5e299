"""The memory planner charges the banks that are allocated, and nothing else, for our models alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.configs.mamba_utils import KimiLinearCacheParams, KimiLinearStateShape, Mamba2StateDType
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_k3.models.hf_config import K3CacheParams
from sglang_k3.speculative import replay_records
from sglang_k3.speculative.record_forms import FORMS, chosen
from sglang_k3.speculative.replay_records import bytes_per_request
from sglang_k3.speculative.state_pool import plan_memory

GIB = 1 << 30
ROWS = 8


def real_params(kind: type[KimiLinearCacheParams] = K3CacheParams):
    """Kimi K3's state shapes on one of eight ranks, bf16."""
    shape = KimiLinearStateShape.create(tp_world_size=8, num_heads=96, head_dim=128, conv_kernel_size=4)
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    return kind(shape=shape, layers=list(range(69)), dtype=dtype)


@pytest.fixture
def server(monkeypatch):
    """What the planner reads of the published configuration; the fields can be changed."""
    schedule = SimpleNamespace(max_running_requests=48, max_mamba_cache_size=None)
    spec = SimpleNamespace(speculative_num_draft_tokens=ROWS)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    monkeypatch.setattr(replay_records, "compute_dtype", lambda dtype, device: dtype)
    return schedule


def planner(params, algorithm=SpeculativeAlgorithm.DSPARK):
    return SimpleNamespace(
        mambaish_config=SimpleNamespace(mamba2_cache_params=params),
        spec_algorithm=algorithm,
        attn_dp_size=1,
        _calculate_mamba_ratio=lambda: 5,
    )


def planned(made, memory=60.0):
    """(GiB that SGLang was given for its slots, whether it was told of drafts)."""
    seen = []

    def original(given, rest):
        seen.append((rest, given.spec_algorithm.is_none()))
        return rest - 1.0

    assert plan_memory(original, made, memory) == seen[0][0] - 1.0
    return seen[0]


def test_the_banks_of_every_running_request_are_charged(server):
    made = planner(real_params())
    rest, told_of_none = planned(made)
    assert bytes_per_request(real_params(), ROWS, FORMS["plain"]) == 13_565_952
    each = bytes_per_request(real_params(), ROWS, chosen())
    assert rest == pytest.approx(60.0 - 49 * each / GIB)
    assert told_of_none and made.spec_algorithm is SpeculativeAlgorithm.DSPARK


@pytest.mark.parametrize("form", FORMS)
def test_what_is_charged_is_what_is_allocated(server, form):
    params = real_params()
    records = replay_records.ReplayRecords(
        replay_records.fields_of(params),
        layers=69,
        requests=48,
        rows=ROWS,
        form=FORMS[form],
        window_rows=3,
        device="meta",
        exact=False,
    )
    assert records.bytes == 49 * bytes_per_request(params, ROWS, FORMS[form])


def test_slots_bound_the_requests_that_can_run(server):
    server.max_mamba_cache_size = 52
    rest, _ = planned(planner(real_params()))
    assert rest == pytest.approx(60.0 - 11 * bytes_per_request(real_params(), ROWS, chosen()) / GIB)


def test_without_speculation_and_for_other_models_nothing_changes(server):
    assert planned(planner(real_params(), SpeculativeAlgorithm.NONE)) == (60.0, True)
    assert planned(planner(real_params(KimiLinearCacheParams))) == (60.0, False)


def test_the_algorithm_comes_back_when_sglang_refuses(server):
    made = planner(real_params())

    def refuse(given, rest):
        raise RuntimeError("not enough memory")

    with pytest.raises(RuntimeError, match="not enough"):
        plan_memory(refuse, made, 0.001)
    assert made.spec_algorithm is SpeculativeAlgorithm.DSPARK
