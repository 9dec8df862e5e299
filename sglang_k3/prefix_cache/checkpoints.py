"""Where prefill and decode keep the states that the prefix cache will hand out."""

from __future__ import annotations

from typing import Any

from sglang_k3.architectures import is_kimi
from sglang_k3.prefix_cache import anchors

ANSWER_OPENING = 32
"""Tokens at most behind a chat prompt's last message: K3's thinking effort and the opened answer."""

LEAST_FORK = 64
"""A shorter common beginning, a chat template's, is worth neither a state nor a chunk that ends there."""


def prefill_checkpoint(original, batch, req) -> Any:
    """AROUND hook on the scheduler's choice of the depth to keep a state at, for one prefill chunk.

    SGLang picks a depth that is a whole number of state chunks behind the start of the prefill chunk, keeps
    none in a chunk shorter than that, and the radix tree then cuts the key to whole pages. Where the chunk
    starts off a page (mixed batches fill the token budget to the last token) the key is shorter than the
    state, and a later hit would start from a state that has already seen tokens it is about to compute.

    Our kernels keep a state at any depth, so it is at a whole page; at which, `_depth` says. A fork that
    SGLang asks for goes first. The entry names the depth itself (`BatchMetadata` reads it), not SGLang's code
    for a multiple of its kernel's chunk.
    """
    if not is_kimi(batch.model_config):
        return original(batch, req)
    depth = _depth(req, batch.tree_cache.page_size)
    entry = original(batch, req)
    if depth <= req.prefix_len:
        assert not entry.track_mask, "SGLang keeps a state in chunks of a page or more only"
        return entry
    if not entry.track_mask:
        _turn(batch.req_to_token_pool, req.kv)
    req.kv.mamba_last_track_seqlen = depth
    return entry._replace(track_mask=True, track_seqlen=depth)


def decode_checkpoint(original, batch, track_positions=None) -> None:
    """AROUND hook on the choice of the buffer that a decode step writes at a boundary.

    SGLang turns the pair of buffers when it processes a result, and with overlap it counts on another decode
    step being under way then. A prefill between two steps makes it turn twice, or not at all, and 64 tokens
    later the step writes over the state that is kept: a request that ends there hands it to the tree under
    the earlier depth. What must not be written is known at that time, so the other buffer is taken.
    """
    pool = batch.req_to_token_pool
    if track_positions is None and is_kimi(batch.model_config) and _pairs(batch, pool):
        track_positions = [
            0 if last is None else pool.get_mamba_ping_pong_other_idx(last)
            for last in (req.kv.mamba_last_track_idx for req in batch.reqs)
        ]
    original(batch, track_positions)
    anchors.only_spares(batch)


def _pairs(batch: Any, pool: Any) -> bool:
    """Whether each request has two buffers that plain decoding turns. The lazy strategy has its own plan."""
    return (
        batch.spec_algorithm.is_none()
        and not pool.enable_mamba_extra_buffer_lazy
        and pool.mamba_ping_pong_track_buffer_size == 2
    )


def _depth(req: Any, page: int) -> int:
    """Where this chunk keeps a state; at or before its start for nowhere. A fork inside a chunk that could
    not end there goes before the chunk's own."""
    depth = _own_depth(req, req.extend_end, page)
    fork = fork_of(req, page)
    return fork if 0 < fork < depth else depth


def _own_depth(req: Any, end: int, page: int) -> int:
    """Of a prompt's last chunk: in front of what a chat template puts behind the last message, which the next
    turn's history renders otherwise. If that is kept already, in front of the last token, which a repetition
    computes again; then at the end. Of a chunk in the middle: at its end.
    """
    prompt = len(req.full_untruncated_fill_ids)
    depths = [min(end, prompt - behind) // page * page for behind in (1 + ANSWER_OPENING, 1, 0)]
    return next((depth for depth in depths if depth > req.prefix_len), req.prefix_len)


def fork_of(req: Any, page: int) -> int:
    """Depth at which the prompt parts from what is cached and where no state stands, in front of the prompt's
    own; 0 if there is none that is worth one."""
    fork = req.mamba_branching_seqlen or 0
    own = _own_depth(req, len(req.full_untruncated_fill_ids), page)
    return fork if fork >= LEAST_FORK and req.prefix_len < fork < own else 0


def _turn(pool: Any, kv: Any) -> None:
    """The buffer that this chunk writes becomes the one to keep, and decoding goes on in the other."""
    kv.mamba_last_track_idx = kv.mamba_next_track_idx
    if not pool.enable_mamba_extra_buffer_lazy:
        kv.mamba_next_track_idx = pool.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)
