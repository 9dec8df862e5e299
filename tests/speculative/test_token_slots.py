"""Token slots of speculative windows, in plain torch."""

from __future__ import annotations

import torch

from sglang_k3.platforms.token_slots import assign, of_range


def test_slots_go_to_each_requests_own_range_in_order():
    table = torch.zeros(4, 10, dtype=torch.int32)
    slots = torch.arange(100, 106)
    assign(torch.tensor([2, 0, 3]), table, torch.tensor([1, 4, 7]), torch.tensor([4, 4, 10]), slots)
    assert table[2].tolist() == [0, 100, 101, 102, 0, 0, 0, 0, 0, 0]
    assert table[3].tolist() == [0, 0, 0, 0, 0, 0, 0, 103, 104, 105]
    assert not table[[0, 1]].any()


def test_a_window_is_read_behind_each_start():
    table = torch.arange(40).view(4, 10).int()
    got = of_range(
        req_pool_indices=torch.tensor([3, 1]),
        req_to_token=table,
        start_offset=torch.tensor([2, 5]),
        end_offset=torch.tensor([5, 8]),
        batch_size=2,
        draft_token_num=3,
        device="cpu",
    )
    assert got.tolist() == [32, 33, 34, 15, 16, 17] and got.dtype == torch.int64


def test_no_requests_have_no_slots():
    nothing = torch.empty(0, dtype=torch.int64)
    assign(nothing, torch.zeros(1, 4, dtype=torch.int32), nothing, nothing, nothing)
    assert of_range(
        req_pool_indices=nothing,
        req_to_token=torch.zeros(1, 4, dtype=torch.int32),
        start_offset=nothing,
        end_offset=nothing,
        batch_size=0,
        draft_token_num=3,
        device="cpu",
    ).shape == (0,)
