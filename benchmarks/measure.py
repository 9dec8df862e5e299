"""Interleaved rounds of several subjects between two readings of the probes, repeated until those agree.

One round times every probe and every subject once, so whatever slows the machine for a while slows them all.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.probes import Probe
from benchmarks.schema import Reading

Clock = Callable[[], float]


@dataclass(frozen=True)
class Protocol:
    """How a case is measured. docs/benchmarks.md gives the reasons.

    sample_seconds: a sample makes as many calls as fill it. portion_bytes: what a memory probe walks over in
    one sample. tolerance: how far a probe before may be from the one after.
    """

    rounds: int = 15
    probe_samples: int = 5
    tolerance: float = 0.05
    attempts: int = 3
    sample_seconds: float = 0.01
    cold_bytes: int = 1 << 30
    portion_bytes: int = 1 << 28
    matmul_size: int = 1536


@dataclass(frozen=True)
class Subject:
    """Something to time. `rounds` limits a slow one to the first rounds, without a warm-up."""

    name: str
    call: Callable[[], object]
    rounds: int | None = None


@dataclass(frozen=True)
class Times:
    """Seconds a call, one for each round."""

    samples: list[float]
    calls: int

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Peak to peak, relative to the median."""
        return (max(self.samples) - min(self.samples)) / self.median


@dataclass(frozen=True)
class Attempt:
    readings: dict[str, Reading]
    times: dict[str, Times]

    @property
    def disagreement(self) -> float:
        """The largest relative difference of a probe before and after."""
        return max((reading.disagreement for reading in self.readings.values()), default=0.0)


@dataclass(frozen=True)
class Settled:
    """The attempt that counts. `valid` is false where the probes never agreed."""

    attempt: Attempt
    attempts: int
    valid: bool


def measure(
    probes: Sequence[Probe],
    subjects: Sequence[Subject],
    protocol: Protocol,
    clock: Clock = time.perf_counter,
) -> Settled:
    """Attempts until the probes before and after agree; else the one that came nearest, marked invalid."""
    calls = {subject.name: _calls_in_a_sample(subject, protocol, clock) for subject in subjects}
    for probe in probes:
        probe.call()
    attempts: list[Attempt] = []
    while len(attempts) < protocol.attempts:
        attempts.append(_attempt(probes, subjects, calls, protocol, clock))
        if attempts[-1].disagreement <= protocol.tolerance:
            return Settled(attempts[-1], len(attempts), True)
    nearest = min(attempts, key=lambda attempt: attempt.disagreement)
    return Settled(nearest, len(attempts), False)


def _calls_in_a_sample(subject: Subject, protocol: Protocol, clock: Clock) -> int:
    """The first call compiles; the second tells how many fill a sample."""
    if subject.rounds is not None:
        return 1
    subject.call()
    seconds = _seconds(subject.call, 1, clock)
    return max(1, math.ceil(protocol.sample_seconds / seconds))


def _attempt(
    probes: Sequence[Probe],
    subjects: Sequence[Subject],
    calls: dict[str, int],
    protocol: Protocol,
    clock: Clock,
) -> Attempt:
    before = {probe.name: _rate(probe, protocol.probe_samples, clock) for probe in probes}
    probed: dict[str, list[float]] = {probe.name: [] for probe in probes}
    timed: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for number in range(protocol.rounds):
        for probe in probes:
            probed[probe.name].append(_seconds(probe.call, 1, clock))
        for subject in subjects:
            if subject.rounds is None or number < subject.rounds:
                timed[subject.name].append(_seconds(subject.call, calls[subject.name], clock))
    after = {probe.name: _rate(probe, protocol.probe_samples, clock) for probe in probes}
    return Attempt(
        {probe.name: _reading(probe, before, after, probed[probe.name]) for probe in probes},
        {name: Times(samples, calls[name]) for name, samples in timed.items()},
    )


def _reading(
    probe: Probe, before: dict[str, float], after: dict[str, float], samples: list[float]
) -> Reading:
    low, high = sorted((before[probe.name], after[probe.name]))
    during = Times(samples, 1)
    return Reading(
        probe=probe.name,
        before=before[probe.name],
        after=after[probe.name],
        during=probe.work / during.median / 1e9,
        during_spread=during.spread,
        peak=probe.work / min(samples) / 1e9,
        disagreement=high / low - 1,
    )


def _rate(probe: Probe, samples: int, clock: Clock) -> float:
    """1e9 bytes or operations a second, median."""
    return probe.work / statistics.median(_seconds(probe.call, 1, clock) for _ in range(samples)) / 1e9


def _seconds(call: Callable[[], object], calls: int, clock: Clock) -> float:
    begin = clock()
    for _ in range(calls):
        call()
    return (clock() - begin) / calls
