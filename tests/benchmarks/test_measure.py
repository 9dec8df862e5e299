"""Rounds, medians, and what happens when the probes disagree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.measure import Protocol, Subject, Times, measure
from benchmarks.probes import Probe
from tests.benchmarks.planted import TickingClock

PROTOCOL = Protocol(rounds=4, probe_samples=3, tolerance=0.05, attempts=3, sample_seconds=1.0)
PROBE_CALLS = 3 + 4 + 3


class Scripted:
    """A probe whose calls take so much longer than the clock's second, in order (the last one for ever)."""

    def __init__(self, clock: TickingClock, extra: list[float]) -> None:
        self.clock, self.extra, self.calls = clock, extra, 0

    def __call__(self) -> None:
        # The first call warms up and is not timed.
        index = self.calls - 1
        self.calls += 1
        if index >= 0:
            self.clock.now += self.extra[min(index, len(self.extra) - 1)]


def settle(extra: list[float], protocol: Protocol = PROTOCOL):
    clock = TickingClock()
    probe = Probe("stream", 10**9, Scripted(clock, extra))
    return measure([probe], [Subject("kernel", lambda: None)], protocol, clock)


def test_agreeing_probes_are_believed_at_once():
    settled = settle([0.0])
    assert (settled.attempts, settled.valid) == (1, True)
    reading = settled.attempt.readings["stream"]
    assert (reading.before, reading.after, reading.during) == (1.0, 1.0, 1.0)
    assert reading.disagreement == 0.0


def test_a_difference_inside_the_tolerance_is_kept_in_the_reading():
    settled = settle([0.0] * 7 + [0.04] * 3)
    assert (settled.attempts, settled.valid) == (1, True)
    assert settled.attempt.readings["stream"].disagreement == pytest.approx(0.04)


def test_disagreeing_probes_are_measured_again():
    disturbed = [0.0] * 7 + [1.0] * 3
    settled = settle([*disturbed, 0.0])
    assert (settled.attempts, settled.valid) == (2, True)
    assert settled.attempt.readings["stream"].disagreement == 0.0


def test_a_disturbance_before_counts_as_much_as_one_after():
    settled = settle([1.0] * 3 + [0.0] * 7 + [0.0])
    assert (settled.attempts, settled.valid) == (2, True)


def test_probes_that_never_agree_leave_the_nearest_attempt_marked_invalid():
    attempts = [[0.0] * 7 + [late] * 3 for late in (0.5, 0.2, 0.9)]
    settled = settle([extra for attempt in attempts for extra in attempt])
    assert len(attempts[0]) == PROBE_CALLS
    assert (settled.attempts, settled.valid) == (3, False)
    assert settled.attempt.disagreement == pytest.approx(0.2)


def test_one_slow_sample_of_a_probe_does_not_move_its_median():
    settled = settle([5.0, 0.0, 0.0, 0.0])
    assert (settled.attempts, settled.valid) == (1, True)


def test_peak_and_spread_keep_what_the_median_hides():
    settled = settle([0.0] * 3 + [1.0, 0.0, 0.0, 3.0] + [0.0] * 3)
    reading = settled.attempt.readings["stream"]
    assert reading.during == pytest.approx(1 / 1.5)
    assert reading.peak == 1.0
    assert reading.during_spread == pytest.approx((4 - 1) / 1.5)


def test_rounds_are_interleaved():
    order: list[str] = []
    probe = Probe("stream", 1, lambda: order.append("probe"))
    subjects = [Subject(name, lambda name=name: order.append(name)) for name in ("a", "b")]
    measure([probe], subjects, PROTOCOL, TickingClock())
    warm_up = ["a", "a", "b", "b", "probe"]
    rounds = ["probe", "a", "b"] * 4
    assert order == [*warm_up, *["probe"] * 3, *rounds, *["probe"] * 3]


def test_a_slow_peer_runs_in_its_rounds_only_and_is_not_warmed_up():
    calls: list[int] = []
    subject = Subject("slow", lambda: calls.append(1), rounds=2)
    settled = measure([], [subject], PROTOCOL, TickingClock())
    assert len(calls) == 2
    assert settled.attempt.times["slow"].samples == [1.0, 1.0]


def test_a_sample_makes_the_calls_that_fill_it():
    calls: list[int] = []
    subject = Subject("quick", lambda: calls.append(1))
    settled = measure([], [subject], replace(PROTOCOL, sample_seconds=2.5), TickingClock())
    times = settled.attempt.times["quick"]
    assert times.calls == 3
    assert len(calls) == 2 + 4 * 3
    assert times.samples == [pytest.approx(1 / 3)] * 4


def test_times_are_summed_up_by_median_and_peak_to_peak():
    times = Times([1.0, 4.0, 2.0], 1)
    assert (times.median, times.spread) == (2.0, 1.5)
