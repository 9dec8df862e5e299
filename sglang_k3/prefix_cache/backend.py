"""The prefix cache behind `--radix-cache-backend k3`, which Kimi models get by default.

`--radix-cache-backend sglang` is SGLang's own choice (its Rust tree), for comparison.
"""

from __future__ import annotations

from typing import Any

NAME, STOCK = "k3", "sglang"


def create(context: Any) -> Any:
    """SGLang's unified radix cache with our component for KDA states."""
    from sglang.srt.mem_cache.registry import create_unified_radix_cache
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    from sglang_k3.prefix_cache.component import KDAStateComponent

    context.params.component_registry_override = {ComponentType.MAMBA: KDAStateComponent}
    return create_unified_radix_cache(context)


def register() -> None:
    from sglang.srt.mem_cache import registry

    registry.register_radix_cache_backend(NAME, create)
    registry.register_radix_cache_backend(STOCK, registry.default_radix_cache_factory)


def registered() -> bool:
    from sglang.srt.mem_cache import registry

    return registry.get_radix_cache_factory(NAME) is create
