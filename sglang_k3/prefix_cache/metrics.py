"""Counters of the KDA state cache, for Prometheus where the server shows metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sglang_k3.prefix_cache.outcome import REASONS, Outcome

QUIET_S = 10.0


class Slots(NamedTuple):
    """Slots of the state pool. running: a request's own state. held: its tracking buffers, and what a
    request that is about to start has reserved. cached: in the tree."""

    running: int
    cached: int
    held: int
    free: int

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self._asdict().items())


class Metrics:
    """labels: Prometheus labels of this process; None keeps the figures in this object alone. slot_bytes: one
    slot's, all layers."""

    def __init__(self, labels: Mapping[str, str] | None, slot_bytes: int) -> None:
        self.outcomes: dict[str, int] = dict.fromkeys(("hit", *REASONS), 0)
        self.waits = self.skips = 0
        self._said = float("-inf")
        self._labels = dict(labels or {})
        self._prometheus = labels is not None
        if not self._prometheus:
            return
        # The client looks at its environment when it is imported; SGLang has set that by now.
        from prometheus_client import Counter, Gauge

        names = tuple(self._labels)
        self._prompt = Counter("sglang_k3:prefix_prompt_tokens", "Tokens of the prompts that started.", names)
        self._hit = Counter("sglang_k3:prefix_hit_tokens", "Prompt tokens restored, KV and state.", names)
        self._lost = Counter(
            "sglang_k3:prefix_lost_tokens",
            "Prompt tokens whose KV was cached and that were computed again for want of a state.",
            (*names, "reason"),
        )
        self._waits = Counter("sglang_k3:slot_waits", "Attempts to start a request without a slot.", names)
        self._skips = Counter("sglang_k3:slot_skips", "States not kept for want of a slot.", names)
        self._slots = Gauge(
            "sglang_k3:state_slots",
            "Slots of the KDA state pool by use.",
            (*names, "use"),
            multiprocess_mode="mostrecent",
        )
        size = Gauge(
            "sglang_k3:state_slot_bytes",
            "Bytes of one slot, states and windows of every layer of this rank.",
            names,
            multiprocess_mode="mostrecent",
        )
        size.labels(**self._labels).set(slot_bytes)

    def count(self, outcome: Outcome, prompt_tokens: int) -> None:
        """A request starts."""
        for name in self.outcomes:
            self.outcomes[name] += getattr(outcome, name)
        if self._prometheus:
            self._prompt.labels(**self._labels).inc(prompt_tokens)
            self._hit.labels(**self._labels).inc(outcome.hit)
            for reason, tokens in outcome.lost.items():
                self._lost.labels(**self._labels, reason=reason).inc(tokens)

    def wait(self) -> None:
        self.waits += 1
        if self._prometheus:
            self._waits.labels(**self._labels).inc()

    def skip(self) -> None:
        self.skips += 1
        if self._prometheus:
            self._skips.labels(**self._labels).inc()

    def show(self, slots: Callable[[], Slots]) -> None:
        if self._prometheus:
            for use, count in slots()._asdict().items():
                self._slots.labels(**self._labels, use=use).set(count)

    def should_say(self) -> bool:
        """Whether the pool's being full has not been said for a while."""
        now, before = time.monotonic(), self._said
        self._said = now
        return now - before >= QUIET_S
