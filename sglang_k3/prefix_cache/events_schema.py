"""What the state event stream is made of (docs/state_events.md): SGLang's frames, vLLM's group fields.

Needs msgspec alone, so that a router can import it without SGLang.
"""

from __future__ import annotations

import msgspec

KV_GROUP, STATE_GROUP = 0, 1
KV_KIND, STATE_KIND = "full_attention", "mamba"
"""Values of `kv_cache_spec_kind`, as in vLLM's events; the groups' numbers mean nothing by themselves."""


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """A tagged map: `type` names the class, keys left at their default are not sent."""


class BlockStored(Event):
    """Blocks in order, each a page of tokens. block_hashes: of the whole prompt up to each block's end.

    In the state group one block, at whose end a state stands; token_depth: tokens up to there, state_bytes:
    of one state.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    token_depth: int | None = None
    state_bytes: int | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class AllBlocksCleared(Event):
    """Everything of every group."""


class Batch(msgspec.Struct, array_like=True, gc=False):
    """[ts, events, attn_dp_rank]"""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    attn_dp_rank: int | None = None


def decode(payload: bytes) -> Batch:
    """Raises msgspec.DecodeError, or msgspec.ValidationError for a batch of another schema."""
    return msgspec.msgpack.decode(payload, type=Batch)
