"""Turns what happens to KDA states into events, beside SGLang's of the KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.kv_events import BlockRemoved as KVRemoved
from sglang.srt.disaggregation.kv_events import BlockStored as KVStored
from sglang.srt.disaggregation.kv_events import StorageMedium, namespaced_block_hash
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.utils import hash_str_to_int64

from sglang_k3.prefix_cache import events_schema as schema
from sglang_k3.prefix_cache.eviction import Node, depth_of, path_up


class StateRecorder(KVCacheEventRecorder):
    """The group schema: KV blocks as SGLang records them, and a block of the state group for each state."""

    def __init__(
        self,
        like: KVCacheEventRecorder,
        holds: Callable[[Node], bool],
        state_bytes: int,
        token_ids: bool = True,
    ) -> None:
        """like: the recorder that this one takes the place of. token_ids: whether events hold them."""
        super().__init__(
            enabled=like.enabled,
            page_size=like.page_size,
            dynamo_format=like.dynamo_format,
            lora_names=like.lora_names,
        )
        self.holds, self.state_bytes, self.token_ids = holds, state_bytes, token_ids

    def state_stored(self, node: Node) -> None:
        if not self.enabled:
            return
        size = self.page_size
        hashes = self._hashes(node)
        self._queue.append(
            schema.BlockStored(
                block_hashes=[hashes[-1]],
                parent_block_hash=hashes[-2] if len(hashes) > 1 else self._parent_block_hash(node),
                token_ids=list(node.key.token_ids[len(node.key) - size : len(node.key)]),
                block_size=size,
                medium=StorageMedium.GPU.value,
                group_idx=schema.STATE_GROUP,
                kv_cache_spec_kind=schema.STATE_KIND,
                token_depth=depth_of(node),
                state_bytes=self.state_bytes,
            )
        )

    def state_gone(self, node: Node) -> None:
        if self.enabled:
            self._queue.append(
                schema.BlockRemoved(
                    block_hashes=[self._hashes(node)[-1]],
                    medium=StorageMedium.GPU.value,
                    group_idx=schema.STATE_GROUP,
                    kv_cache_spec_kind=schema.STATE_KIND,
                )
            )

    def split(self, above: Node, below: Node) -> None:
        """A node was cut in two; a state stays with the lower one."""

    def take(self) -> list[Any]:
        return [_grouped(event) for event in self._taken()]

    def _taken(self) -> list[Any]:
        events = super().take()
        if not self.token_ids:
            for event in events:
                if hasattr(event, "token_ids"):
                    event.token_ids = []
        return events

    def _hashes(self, node: Node) -> list[int]:
        seed = self._namespace_seed(node)
        return [
            namespaced_block_hash(hash_str_to_int64(value), namespace_seed=seed)
            for value in self._node_event_hash_values(node)
        ]


class JointRecorder(StateRecorder):
    """Joint mode: no word of states, and of KV only what a state makes usable, so that a consumer that counts
    blocks counts what the server will restore. Where two prompts part in front of a state, it counts too
    many: by what lies between the fork and the next state above it."""

    def __init__(self, *rest: Any, **named: Any) -> None:
        super().__init__(*rest, **named)
        self._announced: set[Node] = set()

    def record_store(self, node: Node, medium: Any = None, *, session_id: str | None = None) -> None:
        if self.enabled:
            # The chain of hashes has to begin before a state makes anybody ask for it.
            self._node_event_hash_values(node)

    def record_remove(self, node: Node, medium: Any = None) -> None:
        if node in self._announced:
            self._announced.discard(node)
            super().record_remove(node, medium)

    def record_all_cleared(self) -> None:
        self._announced.clear()
        super().record_all_cleared()

    def state_stored(self, node: Node) -> None:
        new = [above for above in path_up(node) if above not in self._announced]
        for above in reversed(new):
            self._announced.add(above)
            super().record_store(above)

    def state_gone(self, node: Node) -> None:
        for above in path_up(node):
            if self.holds(above) or any(child in self._announced for child in above.children.values()):
                return
            self.record_remove(above)

    def split(self, above: Node, below: Node) -> None:
        if below in self._announced:
            self._announced.add(above)

    def take(self) -> list[Any]:
        return self._taken()


def _grouped(event: Any) -> Any:
    """A KV event with its group named."""
    if isinstance(event, KVStored):
        medium = event.medium.value if isinstance(event.medium, StorageMedium) else event.medium
        return schema.BlockStored(
            block_hashes=event.block_hashes,
            parent_block_hash=event.parent_block_hash,
            token_ids=event.token_ids,
            block_size=event.block_size,
            lora_id=event.lora_id,
            medium=medium,
            cache_salt=event.cache_salt,
            session_id=event.session_id,
            lora_name=event.lora_name,
            group_idx=schema.KV_GROUP,
            kv_cache_spec_kind=schema.KV_KIND,
        )
    if isinstance(event, KVRemoved):
        medium = event.medium.value if isinstance(event.medium, StorageMedium) else event.medium
        return schema.BlockRemoved(
            block_hashes=event.block_hashes,
            medium=medium,
            group_idx=schema.KV_GROUP,
            kv_cache_spec_kind=schema.KV_KIND,
        )
    return event
