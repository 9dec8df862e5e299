"""The prefix cache behind `--radix-cache-backend k3`, which Kimi models get by default.

`--radix-cache-backend sglang` is SGLang's own choice (its Rust tree), for comparison.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang_k3.prefix_cache import eviction

NAME, STOCK = "k3", "sglang"


def create(context: Any) -> Any:
    """SGLang's unified radix cache with our component for KDA states."""
    from sglang.srt.mem_cache.registry import create_unified_radix_cache
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    from sglang_k3.prefix_cache import prefill_cost
    from sglang_k3.prefix_cache.component import KDAStateComponent

    params = context.params
    policy, config = params.eviction_policy, params.eviction_policy_config
    if policy in eviction.OURS:
        # The name that is left orders KV whose states are gone.
        params.eviction_policy, params.eviction_policy_config = "lru", None
    measured = policy in ("value", "marconi") and not context.disable_radix_cache
    cost = (
        prefill_cost.measure(context.tp_worker.model_runner, params.tp_cache_group)
        if measured
        else eviction.UNMEASURED
    )
    component = partial(KDAStateComponent, policy=policy, config=config, cost=cost)
    params.component_registry_override = {ComponentType.MAMBA: component}
    cache = create_unified_radix_cache(context)
    _record_states(cache)
    return cache


def _record_states(cache: Any) -> None:
    """Where events of states are asked for, SGLang's recorder of KV events makes room for ours."""
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.runtime_context import get_observability

    from sglang_k3.prefix_cache import events_publisher
    from sglang_k3.prefix_cache.events_recorder import JointRecorder, StateRecorder

    config = get_observability().kv_events_config
    mode = events_publisher.mode_of(config)
    component = cache.components.get(ComponentType.MAMBA)
    if mode is None or component is None:
        return
    make = JointRecorder if mode == events_publisher.JOINT else StateRecorder
    around = component.surroundings
    tokens = events_publisher.with_token_ids(config)
    component.events = make(cache.tree_core.kv_events, around.holds, around.state_bytes, tokens)
    cache.tree_core.kv_events = component.events


def register() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.mem_cache import registry

    from sglang_k3.prefix_cache import events_publisher

    registry.register_radix_cache_backend(NAME, create)
    registry.register_radix_cache_backend(STOCK, registry.default_radix_cache_factory)
    events_publisher.register()
    choices.add_radix_eviction_policy_choices(eviction.OURS)


def registered() -> bool:
    from sglang.srt.arg_groups import choices
    from sglang.srt.mem_cache import registry

    from sglang_k3.prefix_cache import events_publisher

    return (
        registry.get_radix_cache_factory(NAME) is create
        and set(eviction.OURS) <= set(choices.RADIX_EVICTION_POLICY_CHOICES)
        and events_publisher.registered()
    )
