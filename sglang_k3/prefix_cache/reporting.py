"""What a request's answer says about the prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from sglang_k3.prefix_cache.admission import states_of


class OutcomeStreamer(SchedulerOutputStreamer):
    """Adds to meta_info's cached_tokens_details what was cached and yet computed again, by reason."""

    __slots__ = ()

    def get_cached_tokens_details(self, req: Any) -> Any:
        details = SchedulerOutputStreamer.get_cached_tokens_details(self, req)
        outcome = getattr(req, "prefix_outcome", None)
        if outcome is None:
            return details
        lost = {f"lost_{reason}": tokens for reason, tokens in outcome.lost.items()}
        return {"device": 0, "host": 0, **(details or {}), **lost}


def show_slots(scheduler: Any) -> None:
    """Bring the gauges of the state slots up to date; where nobody asked for metrics it costs nothing."""
    states = states_of(scheduler.tree_cache)
    if states is not None:
        states.show_slots()


def output_streamer_class(original: Callable[[Any], type], scheduler: Any) -> type:
    """AROUND hook on the scheduler's choice of the class that builds answers."""
    return original(scheduler) if states_of(scheduler.tree_cache) is None else OutcomeStreamer
