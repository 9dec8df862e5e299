"""What the verify budget's benchmark counts."""

from __future__ import annotations

import pytest

from benchmarks.verify_budget import Answer, rate


def test_a_rate_ends_when_the_last_request_is_asked() -> None:
    """Two clients: the slow request is a quarter done by then, the last one has not begun."""
    answers = [
        Answer(0.0, 1.0, 10, 0),
        Answer(1.0, 2.0, 10, 0),
        Answer(1.0, 5.0, 40, 0),
        Answer(2.0, 9.0, 99, 0),
    ]
    assert rate(answers) == pytest.approx((10 + 10 + 10) / 2)
