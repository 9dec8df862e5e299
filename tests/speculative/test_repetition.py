"""Where a continuation starts to repeat itself."""

from __future__ import annotations

import pytest

from sglang_k3.testing.repetition import before_repetition


@pytest.mark.parametrize(
    "tokens, end",
    [
        ([], 0),
        ([1, 2, 3, 4], 4),
        ([1, 1, 1, 1, 1], 3),
        ([9, 1, 2, 1, 2, 1, 2, 1, 2], 7),
        ([1, 2, 1, 2, 1, 3], 6),
        ([5, 6, 7] * 3, 9),
        ([5, 6, 7] * 2 + [5, 6, 8], 9),
    ],
)
def test_a_text_is_cut_when_a_period_has_come_three_times(tokens, end):
    assert before_repetition(tokens) == end


def test_periods_longer_than_the_limit_are_no_repetition():
    assert before_repetition(list(range(33)) * 3) == 99
    assert before_repetition(list(range(32)) * 3 + [7, 8]) == 96
    assert before_repetition([1, 2] * 5, period=1) == 10
    assert before_repetition([1, 2] * 5, repeats=2) == 4
