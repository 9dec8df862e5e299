"""What is called cold is walked through whole before anything is used again."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from benchmarks import machine
from benchmarks.cases import Sizes, all_cases
from benchmarks.kernels import QUICK
from benchmarks.rotation import rotation


def ranges(calls, cold):
    """(first byte, end) of every cold tensor in call order."""
    return [
        (call[i].data_ptr(), call[i].data_ptr() + call[i].numel() * call[i].element_size())
        for call in calls
        for i in cold
    ]


def test_copies_cover_the_bytes_asked_for_without_overlap():
    base = (torch.randn(3, 5), torch.arange(4), torch.randn(7).bfloat16(), 0.5)
    turning = rotation(base, (0, 2), at_least=10_000)
    spans = sorted(ranges(turning.calls, (0, 2)))
    assert sum(end - begin for begin, end in spans) >= 10_000
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert len(turning.calls) == 10_000 // 74 + 1
    assert turning.slab is not None
    slab = turning.slab.data_ptr()
    assert slab <= spans[0][0] and spans[-1][1] <= slab + turning.cold_bytes


def test_copies_equal_the_original_and_are_aligned():
    base = (torch.randn(3, 5), torch.randn(7).bfloat16())
    for call in rotation(base, (0, 1), at_least=1000).calls:
        assert torch.equal(call[0], base[0]) and torch.equal(call[1], base[1])
        assert call[0].data_ptr() % 64 == call[1].data_ptr() % 64 == 0
        assert call[0].is_contiguous() and call[1].is_contiguous()


def test_no_call_comes_again_before_all_others():
    turning = rotation((torch.zeros(16),), (0,), at_least=64 * 5)
    seen = [turning.next()[0].data_ptr() for _ in range(11)]
    assert len(set(seen[:5])) == 5
    assert seen[5:10] == seen[:5] and seen[10] == seen[0]


def test_groups_of_one_copy_follow_each_other():
    turning = rotation(
        (torch.zeros(16), 0), (0,), at_least=128, expand=lambda call: [(call[0], part) for part in range(3)]
    )
    assert [turning.next()[1] for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert len({call[0].data_ptr() for call in turning.calls}) == 2


def test_groups_of_experts_use_each_expert_once():
    (case,) = (case for case in all_cases(Sizes.full()) if case.name == "experts_4_bf16")
    ids = torch.arange(16).repeat(4, 1)
    groups = [call[1] for call in case.expand((None, ids, *[None] * 7))]
    assert torch.equal(torch.cat([group[0] for group in groups]), torch.arange(64))
    assert all(torch.equal(group, group[:1].expand(4, 16)) for group in groups)


@pytest.mark.parametrize("case", all_cases(Sizes.quick()), ids=lambda case: case.name)
def test_every_case_walks_through_the_bytes_it_says(case):
    turning = rotation(case.make(), case.cold, QUICK.cold_bytes, case.expand)
    spans = set(ranges(turning.calls, case.cold))
    assert sum(end - begin for begin, end in spans) >= QUICK.cold_bytes
    # The cold ones are at least a quarter of the traffic counted: the rest is outputs and small vectors.
    copies = len({call[case.cold[0]].data_ptr() for call in turning.calls})
    calls_a_copy = len(turning.calls) / copies
    assert sum(end - begin for begin, end in spans) / copies / calls_a_copy >= case.bytes_moved / 4


@pytest.mark.parametrize(
    ("l3", "expected"),
    [(None, 1 << 30), (32 << 20, 1 << 30), (480 << 20, 1 << 30), (768 << 20, 1536 << 20)],
    ids=["unknown", "small", "just below", "large"],
)
def test_cold_bytes_are_a_gibibyte_or_twice_the_cache(l3, expected):
    assert machine.cold_bytes(l3) == expected


def test_shared_caches_are_counted_once(tmp_path):
    for cpu, shared in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        for index, (level, size) in enumerate([("1", "32K"), ("3", "16M")]):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(f"{level}\n")
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text(f"{shared}\n")
    assert machine.l3_bytes(tmp_path) == 32 << 20


def test_lscpu_tells_the_cache_where_sysfs_does_not(tmp_path, monkeypatch):
    printed = "CPU(s):  4\nL2 cache:  1048576 (2 instances)\nL3 cache:        33554432 (1 instance)\n"
    monkeypatch.setattr(machine, "_output", lambda *command: printed)
    assert machine.l3_bytes(tmp_path) == 33_554_432
    monkeypatch.setattr(machine, "_output", lambda *command: "")
    assert machine.l3_bytes(tmp_path) is None
