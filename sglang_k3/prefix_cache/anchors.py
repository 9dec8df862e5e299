"""Slots of requests whose states go from boundary to boundary (the anchored form of their records).

Such a request decodes with one slot, its anchor: the state at the last boundary, which is a checkpoint as it
stands. It needs no buffers to keep checkpoints in, so of SGLang's lazy strategy only the slot remains that is
taken when a boundary comes near. The step that crosses the boundary leaves the next anchor there; once its
result is in, the request changes over and frees the old one. Without a free slot the anchor moves on in its
place: a request that ends on that very step then leaves no checkpoint of it, and nothing else is lost.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_k3.speculative.state_pool import records_of


def anchored(pool: Any) -> bool:
    """Whether this request pool's states are anchors."""
    records = records_of(pool)
    return records is not None and records.form.anchored


def plan(original, batch, interval: int, most_drafts: int) -> None:
    """AROUND hook on the lazy strategy's plan of slots for a verify. A cached state may go for one: when the
    request changes over, its old slot is free again."""
    from sglang.srt.managers.schedule_batch import mamba_lazy_spec_in_window

    from sglang_k3.prefix_cache.admission import states_of

    pool = batch.req_to_token_pool
    states = states_of(batch.tree_cache) if anchored(pool) else None
    if states is not None:
        for req in batch.reqs:
            spare = _spare(req.kv)
            needed = req.kv.mamba_ping_pong_empty[spare]
            if needed and mamba_lazy_spec_in_window(req, interval, most_drafts):
                slot = states.take_slot()
                if slot is not None:
                    pool.set_mamba_ping_pong_slot(req, spare, slot)
    original(batch, interval, most_drafts)


def _spare(kv: Any) -> int:
    """Of the two tracking positions the one that the next anchor is written to."""
    return 1 - kv.mamba_next_track_idx


def only_spares(batch: Any) -> None:
    """After SGLang looked up which slots a verify may write: those of the other position hold a prompt's
    checkpoint until the prefill's result is in."""
    if not anchored(batch.req_to_token_pool):
        return
    positions, slots = batch.mamba_track_buffer_indices, batch.mamba_track_indices
    keep = [req.kv.mamba_next_track_idx == at for req, at in zip(batch.reqs, positions, strict=True)]
    slots[torch.tensor(keep, dtype=torch.bool, device=slots.device)] = -1


def crossed(original, processor, req, batch, i: int, at_boundary: bool, depth: int) -> None:
    """AROUND hook on what the lazy strategy does with a verify's result: the request changes over."""
    pool, kv = batch.req_to_token_pool, req.kv
    if not anchored(pool):
        original(processor, req, batch, i, at_boundary, depth)
        return
    if not at_boundary or (req.finished() and depth > req.owned_kv_len()):
        # A run may go over a boundary behind its stop; the anchor before it can still be kept.
        return
    position = batch.mamba_lazy_spec_track_positions_cpu[i]
    kv.mamba_last_track_seqlen = depth
    if position != _spare(kv):
        return
    pool.mamba_allocator.free(kv.mamba_pool_idx.unsqueeze(0))
    kv.mamba_pool_idx = kv.mamba_ping_pong_track_buffer[position].clone()
    pool.set_mamba_ping_pong_slot(req, position, -1)
    pool.req_index_to_mamba_index_mapping[kv.req_pool_idx] = kv.mamba_pool_idx


def holds_prompt_slot(kv: Any) -> bool:
    """Whether the slot that takes a prompt's checkpoint is still the request's."""
    return not kv.mamba_ping_pong_empty[kv.mamba_next_track_idx]


def take_prompt_slot(pool: Any, req: Any) -> torch.Tensor:
    """That slot [1], no longer the request's."""
    position = req.kv.mamba_next_track_idx
    slot = req.kv.mamba_ping_pong_track_buffer[position].unsqueeze(0).clone()
    pool.set_mamba_ping_pong_slot(req, position, -1)
    return slot
