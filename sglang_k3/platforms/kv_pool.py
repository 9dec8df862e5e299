"""SGLang's key/value pool on a plain CPU."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """Without the Triton copy kernel, which the in-tree pool warms up as soon as speculation is on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["enable_kv_cache_copy"] = False
        super().__init__(*args, **kwargs)
