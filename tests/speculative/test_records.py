"""Banks of records: their size, and what a commit refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_k3.kernels.kda.record import record_row
from sglang_k3.models.hf_config import K3CacheParams
from sglang_k3.speculative import record_forms, replay_records
from sglang_k3.speculative.record_forms import FORMS
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
    monkeypatch.setattr(replay_records, "compute_dtype", lambda dtype, device: dtype)
    each = bytes_per_request(params(12, 69, torch.bfloat16), 8, FORMS["plain"])
    assert each == 69 * 8 * (122_880 + 73_728) // 8 == 13_565_952
    folded, ring = (
        bytes_per_request(params(12, 69, torch.bfloat16), 8, FORMS[n]) for n in ("folded", "ring")
    )
    assert folded == each + 69 * 8 * 122_880 // 8 == 22_044_672 and folded <= 28e6
    assert ring == each + 3 * 69 * 8 * 122_880 // 8 == 39_002_112
    anchored = bytes_per_request(params(12, 69, torch.bfloat16), 8, FORMS["anchored"])
    # 71 rows from one boundary to the next, rows of the convolution's input, and a window.
    assert anchored == 69 * (71 * 122_880 + (8 + 3) * 73_728) // 8 == 82_243_584
    full_states = 69 * 8 * 96 * 128 * 128 * 4 // 8
    assert full_states / each > 30


def test_a_cpu_without_bf16_records_what_its_layers_hand_on(monkeypatch):
    monkeypatch.setattr(replay_records, "compute_dtype", lambda dtype, device: torch.float32)
    _, k, _, x = fields_of(params(2, 1, torch.bfloat16))
    assert k.dtype == torch.float32 and x.dtype == torch.bfloat16


def made(form: str) -> ReplayRecords:
    """Of three layers and four requests, with something in every bank."""
    fields = record_row(
        heads=2, value_dim=4, key_dim=8, channels=12, activation=torch.float32, window=torch.float32
    )
    shape: Any = {"layers": 3, "requests": 4, "rows": 8, "window_rows": 3}
    found = ReplayRecords(fields, **shape, form=FORMS[form], device="cpu", exact=True)
    for bank in (found.u, found.k, found.g, found.x):
        bank.normal_()
    return found


@pytest.fixture(params=FORMS)
def records(request):
    return made(request.param)


@pytest.fixture(params=[name for name, form in FORMS.items() if not form.anchored])
def in_place(request):
    """Of a form whose states stay in their slots."""
    return made(request.param)


@pytest.fixture
def pool():
    cache = SimpleNamespace(temporal=torch.randn(3, 6, 2, 4, 8), conv=[torch.randn(3, 6, 3, 12)])
    return SimpleNamespace(mamba_cache=cache)


def copy_step(records: ReplayRecords, plain: ReplayRecords, first: int) -> None:
    """Row 1's last verify, whose records begin at `first`, as if it had been the plain form's."""
    at = [(first + i) % records.ring for i in range(8)]
    to = [(int(plain.starts[1]) + i) % plain.ring for i in range(8)]
    for bank, same in ((records.u, plain.u), (records.k, plain.k), (records.g, plain.g)):
        same[:, 1, to] = bank[:, 1, at]
    plain.x.copy_(records.x)


def copy_of(pool: Any) -> Any:
    cache = pool.mamba_cache
    return SimpleNamespace(
        mamba_cache=SimpleNamespace(temporal=cache.temporal.clone(), conv=[cache.conv[0].clone()])
    )


def commit(records, pool, *, depths=(10, 20), counts=(3, 8), rows=(1, 4)):
    nowhere = torch.tensor([-1, -1])
    records.commit(
        pool,
        bank_rows=torch.tensor(rows),
        depths=torch.tensor(depths),
        counts=torch.tensor(counts),
        track_offsets=nowhere,
        track_slots=nowhere,
    )


def opened(records, pool, *, depths=(10, 20), rows=(1, 4)):
    return records.opened(pool, torch.tensor(rows), torch.tensor(depths), torch.tensor([2, 5]))


def test_banks_belong_to_running_requests_and_have_no_state_in_them(records):
    ring = {"plain": 8, "folded": 16, "ring": 32, "anchored": 71}[records.form.name]
    assert records.u.shape == (3, 5, ring, 2, 4) and records.k.shape == (3, 5, ring, 2, 8)
    assert records.g.shape == (3, 5, ring, 2, 8) and records.x.shape == (3, 5, 8, 12)
    windows = 3 if records.form.anchored else 0
    assert records.bytes == 3 * 5 * (ring * 4 * (8 + 16 + 16) + (8 + windows) * 4 * 12)
    layer = records.layer(1)
    assert layer.u.data_ptr() == records.u[1].data_ptr() and layer.x.shape == (5, 8, 12)


def test_a_commit_moves_its_own_slots(records, pool):
    before = pool.mamba_cache.temporal.clone()
    opened(records, pool)
    commit(records, pool)
    records.settle(pool, torch.tensor([1, 4]), torch.tensor([2, 5]))
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
    opened(records, pool)
    with pytest.raises(StaleRecords, match=says):
        commit(records, pool, **wrong)
    assert torch.equal(pool.mamba_cache.temporal, before[0])
    assert torch.equal(pool.mamba_cache.conv[0], before[1])


def test_records_are_committed_once(records, pool):
    opened(records, pool)
    commit(records, pool)
    with pytest.raises(StaleRecords, match="depth"):
        commit(records, pool)
    with pytest.raises(StaleRecords):
        commit(records, pool, depths=(13, 28))


def test_our_state_shapes_are_told_from_another_models():
    from sglang.srt.configs.mamba_utils import KimiLinearCacheParams

    assert issubclass(K3CacheParams, KimiLinearCacheParams) and K3CacheParams is not KimiLinearCacheParams


def test_a_tail_stays_until_the_next_step_would_not_fit(records, pool):
    """Steps of 8, 3, 8, 8, 2: when states are written, and what a verify finds behind them."""
    counts = (8, 3, 8, 8, 2)
    expected = {
        "plain": [(start, 0, -1) for start in (0, 0, 3, 3, 3)],
        "folded": [(0, 0, -1), (0, 8, 2), (8, 3, 2), (11, 8, 2), (3, 8, 2)],
        "ring": [(0, 0, -1), (0, 8, -1), (0, 11, -1), (0, 19, 2), (19, 8, -1)],
        "anchored": [(0, 0, -1), (0, 8, -1), (0, 11, -1), (0, 19, -1), (0, 27, -1)],
    }[records.form.name]
    depth, found, written = 10, [], []
    for count in counts:
        tail = opened(records, pool, depths=(depth, 20), rows=(1, 4))
        found.append(tuple(int(part[0]) for part in tail[1:]))
        before = pool.mamba_cache.temporal[:, 2].clone()
        commit(records, pool, depths=(depth, 20), counts=(count, 0))
        written.append(not torch.equal(pool.mamba_cache.temporal[:, 2], before))
        depth += count
    assert found == expected
    assert written == [records.form.at_once] * 5


def test_a_checkpoint_inside_the_run_takes_the_tail_into_the_state(in_place, pool):
    """The state and its checkpoint are those of the plain form, whatever was pending."""
    records, plain = in_place, made("plain")
    other = copy_of(pool)
    depth = 10
    for count, offset in ((4, -1), (5, 2), (8, -1), (1, 1), (6, -1)):
        _, (start, _), (tail, _), (fold, _) = opened(records, pool, depths=(depth, 20))
        opened(plain, pool, depths=(depth, 20))
        copy_step(records, plain, int(start) + int(tail))
        if fold >= 0:  # the verify writes the state: here by hand
            move = [torch.tensor([n]) for n in (2, 2, 1)]
            records._commit_states(
                pool.mamba_cache.temporal,
                *move,
                records.u,
                records.k,
                records.g,
                start.view(1),
                tail.view(1),
                torch.tensor([-1]),
                torch.tensor([-1]),
            )
        for each, into in ((records, pool), (plain, other)):
            each.commit(
                into,
                bank_rows=torch.tensor([1, 4]),
                depths=torch.tensor([depth, 20]),
                counts=torch.tensor([count, 0]),
                track_offsets=torch.tensor([offset, -1]),
                track_slots=torch.tensor([3, -1]),
            )
        depth += count
        assert torch.equal(pool.mamba_cache.temporal[:, 3], other.mamba_cache.temporal[:, 3])
        assert torch.equal(pool.mamba_cache.conv[0], other.mamba_cache.conv[0])
        if offset >= 0:
            assert torch.equal(pool.mamba_cache.temporal, other.mamba_cache.temporal)
    records.settle(pool, torch.tensor([1]), torch.tensor([2]))
    assert torch.equal(pool.mamba_cache.temporal, other.mamba_cache.temporal)


def test_a_reader_by_slot_gets_the_whole_state_and_a_writer_ends_the_tail(records, pool):
    opened(records, pool)
    commit(records, pool, counts=(5, 8))
    lagging = pool.mamba_cache.temporal.clone()
    records.forget_slots(torch.tensor([5]))
    records.settle_slots(pool, torch.tensor([5, 2], dtype=torch.int32))
    changed = (pool.mamba_cache.temporal != lagging).flatten(2).any(-1).any(0).tolist()
    assert changed == [False, False, not records.form.at_once, False, False, False]
    assert records.tails.tolist() == [0] * 5
    again = pool.mamba_cache.temporal.clone()
    records.settle_slots(pool, torch.tensor([2]))
    assert torch.equal(pool.mamba_cache.temporal, again)


def test_a_row_that_goes_on_from_another_slot_has_no_tail_for_it(records, pool):
    opened(records, pool)
    commit(records, pool, counts=(5, 8))
    lagging = pool.mamba_cache.temporal.clone()
    records.settle(pool, torch.tensor([1, 4]), torch.tensor([4, 1]))
    assert torch.equal(pool.mamba_cache.temporal, lagging)
    records.forget(torch.tensor([1, 4]))
    tail = records.opened(pool, torch.tensor([1, 4]), torch.tensor([3, 7]), torch.tensor([4, 1]))
    assert tail.tails.tolist() == [0, 0] and tail.fold_slots.tolist() == [-1, -1]


def test_a_tail_that_does_not_end_at_the_depth_is_refused(records, pool):
    opened(records, pool)
    commit(records, pool, counts=(5, 8))
    with pytest.raises(StaleRecords, match="request row 4"):
        opened(records, pool, depths=(15, 29))
    tail = opened(records, pool, depths=(15, 28))
    assert tail.tails.tolist() == ([0, 0] if records.form.at_once else [5, 8])


def test_the_form_is_chosen_by_name(monkeypatch):
    assert record_forms.chosen() is FORMS[record_forms.DEFAULT]
    monkeypatch.setenv(record_forms.VARIABLE, "ring")
    assert record_forms.chosen() is FORMS["ring"]
    monkeypatch.setenv(record_forms.VARIABLE, "rings")
    with pytest.raises(ValueError, match="SGLANG_K3_RECORDS=rings: pass one of plain, folded, ring"):
        record_forms.chosen()


def test_a_slot_that_found_another_use_has_no_tail(in_place, pool):
    """Row 4 ended with a tail for slot 5, which now takes a checkpoint of row 1."""
    records = in_place
    opened(records, pool)
    commit(records, pool, counts=(5, 8))
    records.opened(pool, torch.tensor([1]), torch.tensor([15]), torch.tensor([2]))
    records.commit(
        pool,
        bank_rows=torch.tensor([1]),
        depths=torch.tensor([15]),
        counts=torch.tensor([4]),
        track_offsets=torch.tensor([1]),
        track_slots=torch.tensor([5]),
    )
    kept = pool.mamba_cache.temporal[:, 5].clone()
    records.settle_slots(pool, torch.tensor([5]))
    assert torch.equal(pool.mamba_cache.temporal[:, 5], kept)


def test_an_anchor_goes_over_into_the_slot_of_its_boundary(pool):
    """From slot 2 to 3 and back, then on in its place: always the plain form's states and windows."""
    anchored, plain, other = made("anchored"), made("plain"), copy_of(pool)
    depth, anchor = 10, 2
    steps = ((4, -1, -1), (5, 2, 3), (8, -1, -1), (0, -1, -1), (8, 8, 2), (3, 1, -1), (7, -1, -1))
    for count, offset, into in steps:
        tail = opened(anchored, pool, depths=(depth, 20))
        assert tail.slots.tolist() == [anchor, 5]
        opened(plain, other, depths=(depth, 20))
        copy_step(anchored, plain, int(tail.starts[0] + tail.tails[0]))
        before, crosses = copy_of(pool).mamba_cache, offset >= 0
        for each, where, kept in ((anchored, pool, into), (plain, other, 0 if crosses else -1)):
            each.commit(
                where,
                bank_rows=torch.tensor([1, 4]),
                depths=torch.tensor([depth, 20]),
                counts=torch.tensor([count, 0]),
                track_offsets=torch.tensor([offset, -1]),
                track_slots=torch.tensor([kept, -1]),
            )
        depth += count
        if crosses:
            anchor = anchor if into < 0 else into
            assert torch.equal(pool.mamba_cache.temporal[:, anchor], other.mamba_cache.temporal[:, 0])
            assert torch.equal(pool.mamba_cache.conv[0][:, anchor], other.mamba_cache.conv[0][:, 0])
        rest = [slot for slot in range(6) if not (crosses and slot == anchor)]
        assert torch.equal(pool.mamba_cache.temporal[:, rest], before.temporal[:, rest])
        assert torch.equal(pool.mamba_cache.conv[0][:, rest], before.conv[0][:, rest])
    assert int(anchored.tails[1]) == 2 + 7 and int(anchored.depth[1]) == depth - 9
    anchored.settle(pool, torch.tensor([1]), torch.tensor([anchor]))
    assert torch.equal(pool.mamba_cache.temporal[:, anchor], other.mamba_cache.temporal[:, 2])
    assert torch.equal(pool.mamba_cache.conv[0][:, anchor], other.mamba_cache.conv[0][:, 2])


def test_a_full_ring_is_refused(pool):
    """Anchored requests whose steps name no boundaries."""
    records = made("anchored")
    for depth in range(10, 74, 8):
        opened(records, pool, depths=(depth, 20))
        commit(records, pool, depths=(depth, 20), counts=(8, 0))
    with pytest.raises(StaleRecords, match="and 64 before them from depth 10"):
        opened(records, pool, depths=(74, 20))
