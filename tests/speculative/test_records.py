"""Banks of records: their size, and what a commit refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_k3.kernels.kda.record import record_row
from sglang_k3.models.hf_config import K3CacheParams
from sglang_k3.speculative import replay_records
from sglang_k3.speculative.replay_records import ReplayRecords, StaleRecords, bytes_per_request, fields_of

WIDE = {"heads": 96, "value_dim": 128, "key_dim": 128, "channels": 36_864}


def test_a_record_of_the_real_model_has_the_published_size():
    fields = record_row(**WIDE, activation=torch.bfloat16, window=torch.bfloat16)
    u, k, g, x = (field.bytes for field in fields)
    assert u + k + g == 122_880 and x == 73_728
    assert [field.name for field in fields] == ["u", "k", "g", "x"]


def params(heads, layers, window):
    return SimpleNamespace(
        shape=SimpleNamespace(temporal=(heads, 128, 128), conv=[(3, 3 * heads * 128)]),
        dtype=SimpleNamespace(conv=window),
        layers=list(range(layers)),
    )


def test_a_request_of_the_real_model_takes_at_most_14_mb_on_eight_ranks(monkeypatch):
    monkeypatch.setattr(replay_records, "compute_dtype", lambda dtype: dtype)
    each = bytes_per_request(params(12, 69, torch.bfloat16), 8)
    assert each == 69 * 8 * (122_880 + 73_728) // 8 == 13_565_952
    full_states = 69 * 8 * 96 * 128 * 128 * 4 // 8
    assert full_states / each > 30


def test_a_cpu_without_bf16_records_what_its_layers_hand_on(monkeypatch):
    monkeypatch.setattr(replay_records, "compute_dtype", lambda dtype: torch.float32)
    _, k, _, x = fields_of(params(2, 1, torch.bfloat16))
    assert k.dtype == torch.float32 and x.dtype == torch.bfloat16


@pytest.fixture
def records():
    fields = record_row(
        heads=2, value_dim=4, key_dim=8, channels=12, activation=torch.float32, window=torch.float32
    )
    made = ReplayRecords(fields, layers=3, requests=4, rows=8, device="cpu", exact=True)
    for bank in (made.u, made.k, made.g, made.x):
        bank.normal_()
    return made


@pytest.fixture
def pool():
    cache = SimpleNamespace(temporal=torch.randn(3, 6, 2, 4, 8), conv=[torch.randn(3, 6, 3, 12)])
    return SimpleNamespace(mamba_cache=cache)


def commit(records, pool, *, depths=(10, 20), counts=(3, 8), rows=(1, 4)):
    nowhere = torch.tensor([-1, -1])
    records.commit(
        pool,
        slots=torch.tensor([2, 5]),
        bank_rows=torch.tensor(rows),
        depths=torch.tensor(depths),
        counts=torch.tensor(counts),
        track_offsets=nowhere,
        track_slots=nowhere,
    )


def test_banks_belong_to_running_requests_and_have_no_state_in_them(records):
    assert records.u.shape == (3, 5, 8, 2, 4) and records.k.shape == (3, 5, 8, 2, 8)
    assert records.g.shape == (3, 5, 8, 2, 8) and records.x.shape == (3, 5, 8, 12)
    assert records.bytes == 3 * 5 * 8 * (4 * (8 + 16 + 16) + 4 * 12)
    layer = records.layer(1)
    assert layer.u.data_ptr() == records.u[1].data_ptr() and layer.x.shape == (5, 8, 12)


def test_a_commit_moves_its_own_slots(records, pool):
    before = pool.mamba_cache.temporal.clone()
    records.opened(torch.tensor([1, 4]), torch.tensor([10, 20]))
    commit(records, pool)
    changed = (pool.mamba_cache.temporal != before).flatten(2).any(-1)
    assert changed.all(0).tolist() == changed.any(0).tolist() == [False, False, True, False, False, True]


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"counts": (3, 9)}, "9 tokens"),
        ({"counts": (-1, 3)}, "-1 tokens"),
        ({"depths": (10, 21)}, "depth 21"),
        ({"depths": (2, 20)}, "from depth 10"),
        ({"rows": (1, 3)}, "request row 3"),
    ],
)
def test_counts_out_of_range_and_records_of_another_step_are_refused_untouched(records, pool, wrong, says):
    before = pool.mamba_cache.temporal.clone(), pool.mamba_cache.conv[0].clone()
    records.opened(torch.tensor([1, 4]), torch.tensor([10, 20]))
    with pytest.raises(StaleRecords, match=says):
        commit(records, pool, **wrong)
    assert torch.equal(pool.mamba_cache.temporal, before[0])
    assert torch.equal(pool.mamba_cache.conv[0], before[1])


def test_records_are_committed_once(records, pool):
    records.opened(torch.tensor([1, 4]), torch.tensor([10, 20]))
    commit(records, pool)
    with pytest.raises(StaleRecords, match="depth"):
        commit(records, pool)
    with pytest.raises(StaleRecords):
        commit(records, pool, depths=(13, 28))


def test_our_state_shapes_are_told_from_another_models():
    from sglang.srt.configs.mamba_utils import KimiLinearCacheParams

    assert issubclass(K3CacheParams, KimiLinearCacheParams) and K3CacheParams is not KimiLinearCacheParams
