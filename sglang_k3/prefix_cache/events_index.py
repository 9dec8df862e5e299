"""What a worker holds, rebuilt from its events. Needs msgspec alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_k3.prefix_cache.events_schema import (
    KV_GROUP,
    STATE_KIND,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
)


class Holdings:
    """blocks: hash of each KV block -> what was said of it. states: hash of each state's block -> the
    same."""

    def __init__(self) -> None:
        self.blocks: dict[int, BlockStored] = {}
        self.states: dict[int, BlockStored] = {}

    def apply(self, batch: Batch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                self.states.clear()
            elif isinstance(event, BlockRemoved):
                group = self._group(event)
                for block in event.block_hashes:
                    group.pop(block, None)
            else:
                self._group(event).update(split(event))

    def _group(self, event: BlockStored | BlockRemoved) -> dict[int, BlockStored]:
        return self.states if event.kv_cache_spec_kind == STATE_KIND else self.blocks

    def depths(self, blocks: Sequence[int], block_size: int) -> tuple[int, int]:
        """Tokens of a prompt (its blocks' hashes in order) that this worker restores, which end at the
        deepest state within the KV that it holds; and those whose KV it holds. The last token of a prompt is
        always computed: leave its block out if it ends one.
        """
        restored = held = 0
        for number, block in enumerate(blocks, 1):
            if block not in self.blocks:
                break
            held = number * block_size
            if block in self.states:
                restored = held
        return restored, held

    def hit(self, blocks: Sequence[int], block_size: int) -> int:
        """The tokens that this worker restores."""
        return self.depths(blocks, block_size)[0]

    def kv_hit(self, blocks: Sequence[int], block_size: int) -> int:
        """The same by KV alone, as a consumer counts that knows of no states."""
        return self.depths(blocks, block_size)[1]

    def events(self) -> list[BlockStored | AllBlocksCleared]:
        """What a consumer that knows nothing has to be told: parents before children."""
        return [AllBlocksCleared(), *self.blocks.values(), *self.states.values()]


def split(event: BlockStored) -> Iterator[tuple[int, BlockStored]]:
    """An event of one block for each block of a chain."""
    parent, size = event.parent_block_hash, event.block_size
    if len(event.block_hashes) > 1 and event.group_idx in (None, KV_GROUP) and event.token_ids:
        size = len(event.token_ids) // len(event.block_hashes)
    for number, block in enumerate(event.block_hashes):
        tokens = event.token_ids[number * size : (number + 1) * size]
        yield block, _one(event, block, parent, tokens)
        parent = block


def _one(event: BlockStored, block: int, parent: int | None, tokens: list[int]) -> BlockStored:
    return BlockStored(
        block_hashes=[block],
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=event.block_size,
        lora_id=event.lora_id,
        medium=event.medium,
        cache_salt=event.cache_salt,
        session_id=event.session_id,
        lora_name=event.lora_name,
        group_idx=event.group_idx,
        kv_cache_spec_kind=event.kv_cache_spec_kind,
        token_depth=event.token_depth,
        state_bytes=event.state_bytes,
    )
