"""Paged latent attention on a CPU.

"blocks" goes through a request's keys a block at a time with an online softmax (arXiv 1805.02867), so it
copies one block of the cache, never the whole. "rows" does the same for one token and one head at a
time, in a fixed order over absolute positions: a token's bits depend on its own query and the cached
rows it sees, not on the batch, the chunking or the phase.
"""

from __future__ import annotations

import numpy as np
import torch

from sglang_k3.kernels import registry
from sglang_k3.kernels.mla.cpu_rows import attend_rows
from sglang_k3.kernels.registry import Call
from sglang_k3.kernels.row_math import float_rows
from sglang_k3.kernels.threads import use_threads_for

KEYS = 512
"""Cache rows gathered at a time: 1.2 MB of fp32 at 576 columns, which stays in a core's L2."""
QUERIES = 2048
"""Most (row, head) pairs scored against one block of keys: 4 MB of fp32 scores."""


def _fp32_only(call: Call) -> str | None:
    return None if call.dtype == torch.float32 else f"row order is kept in float32, not {call.dtype}"


@registry.register("mla.paged_attention", "rows", preference=5, exact=True, supports=_fp32_only)
def paged_attention_rows(
    q: torch.Tensor,
    cache: torch.Tensor,
    token_table: torch.Tensor,
    request_rows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prefix_lens: torch.Tensor,
    scale: float,
    latent: int,
) -> torch.Tensor:
    """Arguments and result as the reference; q and cache fp32, a cache row's columns contiguous."""
    if cache.stride(1) != 1:
        raise ValueError("the columns of a cache row must be contiguous")
    out = torch.zeros(q.shape[0], q.shape[1], latent)
    lengths = cu_seqlens.diff()
    requests = torch.arange(lengths.shape[0]).repeat_interleave(lengths)
    positions = (prefix_lens - cu_seqlens[:-1])[requests] + torch.arange(requests.shape[0])
    use_threads_for(int((positions + 1).sum()) * q.shape[1] * q.shape[2])
    attend_rows(
        float_rows(q),
        cache.as_strided(((cache.shape[0] - 1) * cache.stride(0) + cache.shape[1],), (1,)).numpy(),
        cache.stride(0),
        token_table.numpy(),
        request_rows[requests].numpy(),
        positions.numpy(),
        np.float32(scale),
        out.numpy(),
    )
    return out


@registry.register("mla.paged_attention", "blocks", preference=10)
def paged_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    token_table: torch.Tensor,
    request_rows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prefix_lens: torch.Tensor,
    scale: float,
    latent: int,
) -> torch.Tensor:
    """Arguments and result as the reference; scores, softmax and sums in fp32 or wider."""
    heads = q.shape[1]
    out = q.new_zeros(q.shape[0], heads, latent)
    bounds = cu_seqlens.tolist()
    tile = max(1, QUERIES // heads)
    for n, (prefix, table_row) in enumerate(zip(prefix_lens.tolist(), request_rows.tolist(), strict=True)):
        for start in range(bounds[n], bounds[n + 1], tile):
            end = min(start + tile, bounds[n + 1])
            position = prefix + start - bounds[n]
            slots = token_table[table_row, : position + end - start]
            out[start:end] = _attend(q[start:end], cache, slots, position, scale, latent)
    return out


def _attend(
    q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, position: int, scale: float, latent: int
) -> torch.Tensor:
    """Rows q [r, H, D], the first at `position`, over the cache rows `slots` -> [r, H, latent]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    rows, heads, width = q.shape
    queries = q.reshape(rows * heads, width).to(wide) * scale
    top = queries.new_full((rows * heads, 1), float("-inf"))
    total = queries.new_zeros(rows * heads, 1)
    acc = queries.new_zeros(rows * heads, latent)
    last_seen = torch.arange(position, position + rows).view(rows, 1, 1)
    for start in range(0, slots.shape[0], KEYS):
        keys = cache.index_select(0, slots[start : start + KEYS]).to(wide)
        scores = queries @ keys.T
        end = start + keys.shape[0]
        if end - 1 > position:  # else every row sees the whole block
            hidden = torch.arange(start, end) > last_seen
            scores.view(rows, heads, -1).masked_fill_(hidden, float("-inf"))
        # Every row sees position 0, so after the first block `top` is finite.
        new_top = torch.maximum(top, scores.amax(1, keepdim=True))
        shares = scores.sub_(new_top).exp_()
        kept = torch.exp(top - new_top)
        total = total * kept + shares.sum(1, keepdim=True)
        acc = (acc * kept).addmm_(shares, keys[:, :latent])
        top = new_top
    return (acc / total).view(rows, heads, latent).to(q.dtype)
