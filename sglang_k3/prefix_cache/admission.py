"""Which requests start: those whose KDA state slots are at hand, because they hold them already.

SGLang admits by tokens and allocates slots afterwards; a pool that is short of slots then ends the
scheduler. Here a request is admitted with its slots in hand, or waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_k3.prefix_cache.checkpoints import fork_of
from sglang_k3.prefix_cache.component import KDAStateComponent


def states_of(cache: Any) -> KDAStateComponent | None:
    """Our component of a tree cache, if it has it."""
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    component = getattr(cache, "components", {}).get(ComponentType.MAMBA)
    return component if isinstance(component, KDAStateComponent) else None


@contextmanager
def _chunk_ends_at_fork(adder: Any, req: Any, whole: bool) -> Iterator[None]:
    """A chunk keeps one state. Ending the first one where the prompt parts from what is cached keeps that
    and, with the rest of the prompt, the prompt's own. SGLang follows one request in chunks at a time.

    whole: the chunk stays as it is."""
    left = adder.rem_chunk_tokens
    tokens = fork_of(req, adder.page_size) - req.prefix_len
    most = len(req.full_untruncated_fill_ids) - req.prefix_len
    if whole or adder.new_chunked_req is not None or left is None or not 0 < tokens < min(left, most):
        yield
        return
    adder.rem_chunk_tokens = tokens
    try:
        yield
    finally:
        adder.rem_chunk_tokens += left - tokens


def add_one_req(original: Callable[..., Any], adder: Any, req: Any, *rest: Any, **named: Any) -> Any:
    """AROUND hook on the prefill adder's step for one waiting request."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    states = states_of(adder.tree_cache)
    if states is None:
        return original(adder, req, *rest, **named)
    tracking = req.kv.mamba_ping_pong_track_buffer is None
    verdict = AddReqResult.NO_TOKEN
    if states.reserve(req):
        # Under SGLang's order the states of many forks push out those of turns that come back.
        whole = states.eviction is None or named.get("has_chunked_req", True)
        with _chunk_ends_at_fork(adder, req, whole):
            verdict = original(adder, req, *rest, **named)
        if req in adder.can_run_list:
            states.admitted(req)
            return verdict
    states.give_back(req, tracking)
    return verdict
