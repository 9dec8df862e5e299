"""Which requests start: those whose KDA state slots are at hand, because they hold them already.

SGLang admits by tokens and allocates slots afterwards; a pool that is short of slots then ends the
scheduler. Here a request is admitted with its slots in hand, or waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_k3.prefix_cache.component import KDAStateComponent


def states_of(cache: Any) -> KDAStateComponent | None:
    """Our component of a tree cache, if it has it."""
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    component = getattr(cache, "components", {}).get(ComponentType.MAMBA)
    return component if isinstance(component, KDAStateComponent) else None


def add_one_req(original: Callable[..., Any], adder: Any, req: Any, *rest: Any, **named: Any) -> Any:
    """AROUND hook on the prefill adder's step for one waiting request."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    states = states_of(adder.tree_cache)
    if states is None:
        return original(adder, req, *rest, **named)
    tracking = req.kv.mamba_ping_pong_track_buffer is None
    verdict = AddReqResult.NO_TOKEN
    if states.reserve(req):
        verdict = original(adder, req, *rest, **named)
        if req in adder.can_run_list:
            states.admitted(req)
            return verdict
    states.give_back(req, tracking)
    return verdict
