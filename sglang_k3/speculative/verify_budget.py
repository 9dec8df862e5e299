"""How many drafted rows each request verifies, and whether it drafts at all.

A row is worth verifying while the tokens it is likely to yield outweigh the time it adds to everybody's step.
Both sides are estimates that serving corrects: the draft's confidence, to a power that follows what was
accepted of it, and the times of past steps, regressed on what they computed. One solver over the whole batch
maximises expected tokens by expected seconds. A request whose drafts do not pay is paused: it verifies its
own token alone, no draft is computed for it, and it is tried again from time to time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_k3.speculative.step_times import StepTimes

_EXPLORED_STEPS = 32
_UNSEEN_STEPS = 8
"""Of these the first, one of each size, prepare kernels: their times say nothing."""

_SMOOTHING = 0.25
_OWN_CORRECTION, _SHARED_CORRECTION = 0.5, 0.1
"""How fast a step's surprise moves the logarithm of the trust in a request's drafts, and in those of all like
it."""

_NEARLY = 0.03

_RESUME_GAIN = 0.05
"""A paused request drafts again when a trial promises so many tokens more than it costs: not the 0 that
pauses it, or noise would switch it to and fro."""

_FIRST_TRIAL, _LAST_TRIAL = 8, 128
"""Steps until a pause is tried again, doubled after each trial that does not pay."""


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer: a step loads those that its rows touch, all of them at most."""

    count: int
    top_k: int

    def touched(self, rows: np.ndarray) -> np.ndarray:
        """Expected number, for routes that are independent."""
        return self.count * (1 - (1 - self.top_k / self.count) ** rows)


@dataclass(frozen=True)
class Work:
    """Of one step: requests, tokens of their contexts together, and whether any of them draws its tokens."""

    count: int
    context: int
    sampled: bool = False

    def of_draft(self, drafting: int) -> list[float]:
        """Features of a draft for so many of the requests."""
        return [1.0, drafting, drafting / self.count * self.context * 1e-3, drafting * self.sampled]


@dataclass
class _Request:
    greedy: bool
    trust: float
    """Exponent of the draft's confidences: below 1 where more was accepted of them than they promised."""

    gain: float | None = None
    paused: bool = False


def _corrected(trust: float, surprise: float, rate: float) -> float:
    """surprise: drafts expected less those accepted, by those verified."""
    return float(np.clip(trust * np.exp(rate * surprise), 0.02, 50.0))


@dataclass(frozen=True)
class Decision:
    """rows [N]: to verify, 1..D. expected [N]: drafts expected to be accepted of them."""

    rows: list[int]
    expected: list[float]


class VerifyBudget:
    """rows: D of a full verify. One object a server; requests are known by their ids."""

    def __init__(self, rows: int, experts: Experts | None) -> None:
        self.rows = rows
        self.experts = experts
        self.verify_times, self.draft_times, self.rest_times = StepTimes(5), StepTimes(4), StepTimes(2)
        self._requests: dict[str, _Request] = {}
        self._trust = {True: 1.0, False: 1.0}
        """That of greedy and of sampled requests, where a new one begins."""

        self._explored = 0
        self._until_trial = self._interval = _FIRST_TRIAL
        self._last_count = 0

    # --- before the draft --------------------------------------------------------------------------------

    def who_drafts(self, ids: Sequence[str]) -> list[bool]:
        """[N]: for whom a draft is worth computing in this step."""
        requests = [self._request(name) for name in ids]
        if self._explored < _EXPLORED_STEPS or not any(request.paused for request in requests):
            return [True] * len(requests)
        if abs(len(ids) - self._last_count) > 0.25 * self._last_count:
            # Other rows share the step's time: what did not pay may pay now.
            self._interval = _FIRST_TRIAL
            self._until_trial = min(self._until_trial, 2)
        self._last_count = len(ids)
        self._until_trial -= 1
        if self._until_trial <= 0:
            return [True] * len(requests)
        return [not request.paused for request in requests]

    # --- between draft and verify ------------------------------------------------------------------------

    def decide(
        self, ids: Sequence[str], drafted: Sequence[bool], chances: np.ndarray, context: int
    ) -> Decision:
        """chances [N, D - 1]: of each draft to be accepted if those before it are. context: tokens that the
        requests' rows read, together."""
        requests = [self._request(name) for name in ids]
        count = len(requests)
        trust = np.array([request.trust for request in requests])[:, None]
        drafts = np.where(np.asarray(drafted)[:, None], np.cumprod(chances, 1) ** trust, 0.0)
        if self._explored < _EXPLORED_STEPS:
            # Steps of every size, so that the time of a row can be told from a step's.
            each = 1 + self._explored * 5 % self.rows
            self._explored += 1
            return self._decision([each] * count, drafts)
        if not any(drafted):
            return self._decision([1] * count, drafts)
        order = np.argsort(-drafts, axis=None, kind="stable")
        ranked = drafts.ravel()[order]
        ranked = ranked[ranked > 0]
        added = self._totals(count, len(ranked)) - count
        work = self._work(requests, context)
        seconds = self.verify_seconds(work, count + added) + self.draft_seconds(work, sum(drafted))
        # The scheduler's share is the same for any rows; the dearer a step, the more it should yield.
        seconds = seconds + self.rest_seconds(count)
        rates = (count + np.concatenate([[0.0], np.cumsum(ranked)])[added]) / seconds
        # Where more rows are nearly as good, they are better: no request waits for the others' likelier
        # drafts, and the estimates are no finer.
        best = int(np.flatnonzero(rates >= (1 - _NEARLY) * rates.max())[-1])
        rows = 1 + np.bincount(order[: added[best]] // (self.rows - 1), minlength=count)
        self._judge(requests, drafted, rows, drafts, float(rates[best]), work)
        return self._decision(rows.tolist(), drafts)

    @staticmethod
    def _work(requests: Sequence[_Request], context: int) -> Work:
        return Work(len(requests), context, not all(request.greedy for request in requests))

    @staticmethod
    def _totals(count: int, drafted: int) -> np.ndarray:
        """Rows that a step may have, in order, where so many drafts are at hand: none of them, all, and four
        numbers an octave. Kernels are prepared for each new number of rows, which takes longer than the step,
        and a server that meets too many forgets them again."""
        every = np.arange(count, count + drafted + 1)
        steps = 2.0 ** np.maximum(np.floor(np.log2(every)) - 2, 0)
        return every[(every % steps == 0) | (every == count) | (every == every[-1])]

    def verify_seconds(self, work: Work, rows: np.ndarray) -> np.ndarray:
        return self.verify_times(self._verify_features(work, np.asarray(rows, dtype=float)))

    def draft_seconds(self, work: Work, drafting: int) -> float:
        """Of a draft for `drafting` of the requests."""
        return float(self.draft_times(np.array(work.of_draft(drafting)))) if drafting else 0.0

    def rest_seconds(self, count: int) -> float:
        """Between two steps, in which the scheduler hands out what the first one made."""
        return float(self.rest_times(np.array([1.0, count])))

    def observe_rest(self, count: int, seconds: float) -> None:
        """seconds: between two steps of `count` requests, with no other work in between."""
        self.rest_times.observe([1.0, count], seconds)

    def _verify_features(self, work: Work, rows: np.ndarray) -> np.ndarray:
        touched = self.experts.touched(rows) if self.experts else np.zeros_like(rows)
        # Every row reads its request's context; where one request draws its tokens, all go through the same.
        read, drawn = rows / work.count * work.context * 1e-3, rows * work.sampled
        return np.stack([np.ones_like(rows), rows, touched, read, drawn], -1)

    def _judge(
        self,
        requests: list[_Request],
        drafted: Sequence[bool],
        rows: np.ndarray,
        drafts: np.ndarray,
        rate: float,
        work: Work,
    ) -> None:
        """Pause whose drafts have not paid lately; go on drafting where a trial pays."""
        count, total = len(requests), int(rows.sum())
        plain, speculating = self.verify_seconds(work, np.array([count, total]))
        row_seconds = (speculating - plain) / max(1, total - count)
        fixed = self.draft_seconds(work, 1)
        each = max(0.0, self.draft_seconds(work, 2) - fixed)
        kept = np.arange(self.rows - 1) < (rows - 1)[:, None]
        gains = (drafts * kept).sum(1) - rate * (row_seconds * (rows - 1) + each)
        gains = np.where(drafted, gains, 0.0)
        # The first draft of a step costs most of what a draft costs, and all share it.
        gains -= np.where(drafted, rate * (fixed - each) / sum(drafted), 0.0)
        trial = any(
            request.paused and is_drafted for request, is_drafted in zip(requests, drafted, strict=True)
        )
        resumed = False
        for request, is_drafted, gain in zip(requests, drafted, gains.tolist(), strict=True):
            if not is_drafted:
                continue
            if request.paused:
                request.paused = gain < _RESUME_GAIN
                request.gain = gain
                resumed |= not request.paused
            else:
                last = gain if request.gain is None else request.gain
                smoothed = last + _SMOOTHING * (gain - last)
                request.gain, request.paused = smoothed, smoothed < 0
        if trial:
            self._interval = _FIRST_TRIAL if resumed else min(2 * self._interval, _LAST_TRIAL)
            self._until_trial = self._interval

    @staticmethod
    def _decision(rows: list[int], drafts: np.ndarray) -> Decision:
        expected = [float(chances[: count - 1].sum()) for chances, count in zip(drafts, rows, strict=True)]
        return Decision(rows, expected)

    # --- behind the step ---------------------------------------------------------------------------------

    def observe(
        self,
        ids: Sequence[str],
        decision: Decision,
        counts: Sequence[int],
        context: int,
        drafting: int,
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """counts [N]: tokens accepted, the target's own included. Seconds as measured on rank 0."""
        work = self._work([self._request(name) for name in ids], context)
        if self._explored > _UNSEEN_STEPS:
            rows = np.array(float(sum(decision.rows)))
            self.verify_times.observe(self._verify_features(work, rows), verify_seconds)
        if drafting and self._explored > _UNSEEN_STEPS:
            self.draft_times.observe(work.of_draft(drafting), draft_seconds)
        for name, verified, expected, count in zip(
            ids, decision.rows, decision.expected, counts, strict=True
        ):
            if verified > 1:
                request = self._request(name)
                surprise = (expected - (min(count, verified) - 1)) / (verified - 1)
                request.trust = _corrected(request.trust, surprise, _OWN_CORRECTION)
                shared, rate = self._trust[request.greedy], _SHARED_CORRECTION / len(ids)
                self._trust[request.greedy] = _corrected(shared, surprise, rate)

    def forget(self, name: str) -> None:
        self._requests.pop(name, None)

    def welcome(self, name: str, greedy: bool) -> None:
        """A request that may be new; greedy: a draft is accepted where it is the likeliest token, however
        likely it is."""
        if name not in self._requests:
            others = self._requests.values()
            # Where nobody's drafts pay, a newcomer waits for the next trial with the rest.
            paused = bool(others) and all(request.paused for request in others)
            self._requests[name] = _Request(greedy, self._trust[greedy], paused=paused)

    def _request(self, name: str) -> _Request:
        self.welcome(name, greedy=True)
        return self._requests[name]

    def paused(self, ids: Sequence[str]) -> int:
        """How many of these requests are."""
        return sum(self._requests[name].paused for name in ids if name in self._requests)
