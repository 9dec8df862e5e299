"""Kernels over several threads."""

from __future__ import annotations

import threading

import pytest
import torch

from sglang_k3.kernels.split import over_items, threads_for
from tests.kernels.invariance import torch_threads


@pytest.mark.parametrize("items", [0, 1, 2, 3, 10])
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_every_item_is_handled_once(items, threads):
    counts = [0] * items
    ranges = []

    def kernel(first: int, last: int, amount: int) -> None:
        ranges.append((first, last))
        for item in range(first, last):
            counts[item] += amount

    with torch_threads(threads):
        over_items(kernel, items, 1, 5)
    assert counts == [5] * items
    assert len(ranges) == max(1, min(threads, items))


def test_little_work_stays_on_the_calling_thread():
    used = []
    over_items(lambda first, last: used.append((first, last, threading.get_ident())), 10, 100)
    assert used == [(0, 10, threading.get_ident())]


def test_a_failing_part_is_reported():
    def kernel(first: int, last: int) -> None:
        if first > 0:
            raise ArithmeticError(f"item {first}")

    with torch_threads(2), pytest.raises(ArithmeticError, match="item 2"):
        over_items(kernel, 4, 1)


def test_several_python_threads_at_once():
    """SGLang's threads may be in kernels at the same time."""
    totals = [0] * 8

    def kernel(first: int, last: int, out: list[int], place: int) -> None:
        out[place] += last - first

    with torch_threads(2):
        callers = [
            threading.Thread(target=over_items, args=(kernel, 1, 1, totals, place)) for place in range(8)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert totals == [1] * 8


@pytest.mark.parametrize("operations, inside", [(1, 1), (79_999_999, 1), (80_000_000, 3)])
def test_small_products_run_on_one_thread_and_the_count_comes_back(operations: int, inside: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with threads_for(operations):
            assert torch.get_num_threads() == inside
        with pytest.raises(ZeroDivisionError), threads_for(operations):
            _ = 1 // 0
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
