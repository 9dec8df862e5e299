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
from sglang_k3.kernels.mla.cpu_rows import HEADS, attend_rows, place_rows
from sglang_k3.kernels.row_math import LANES, array_of, float_rows, fp32_only
from sglang_k3.kernels.split import over_items, threads_for

KEYS = 512
"""Cache rows gathered at a time: 1.2 MB of fp32 at 576 columns, which stays in a core's L2."""
_FEW_ROWS = 2
"""Rows a request, on average, up to which the matrix products of "blocks" are too small to be worth it."""
QUERIES = 2048
"""Most (row, head) pairs scored against one block of keys: 4 MB of fp32 scores."""


@registry.register("mla.paged_attention", "rows", preference=5, exact=True, supports=fp32_only)
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
    """Arguments and result as the reference; a cache row's columns contiguous. Also bf16, in fp32 inside."""
    if cache.stride(1) != 1:
        raise ValueError("the columns of a cache row must be contiguous")
    out = torch.zeros(q.shape[0], q.shape[1], latent)
    rows, positions = np.empty(q.shape[0], np.int64), np.empty(q.shape[0], np.int64)
    tokens, keys = place_rows(cu_seqlens.numpy(), prefix_lens.numpy(), request_rows.numpy(), rows, positions)
    flat = cache.as_strided(((cache.shape[0] - 1) * cache.stride(0) + cache.shape[1],), (1,))
    over_items(
        attend_rows,
        tokens * -(-q.shape[1] // HEADS),
        keys * q.shape[1] * q.shape[2] // LANES,
        float_rows(q),
        array_of(flat),
        cache.stride(0),
        token_table.numpy(),
        rows,
        positions,
        np.float32(scale),
        out.numpy(),
    )
    return out.to(q.dtype)


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
    """Arguments and result as the reference; scores, softmax and sums in fp32 or wider.

    A batch with few rows for each request (decode) goes row by row: one compiled loop over all of them.
    """
    if q.shape[0] <= _FEW_ROWS * request_rows.shape[0] and q.dtype in (torch.float32, torch.bfloat16):
        arguments = (token_table, request_rows, cu_seqlens, prefix_lens, scale, latent)
        return paged_attention_rows(q, cache, *arguments)
    heads = q.shape[1]
    out = q.new_zeros(q.shape[0], heads, latent)
    bounds = cu_seqlens.tolist()
    tile = max(1, QUERIES // heads)
    for n, (prefix, table_row) in enumerate(zip(prefix_lens.tolist(), request_rows.tolist(), strict=True)):
        for start in range(bounds[n], bounds[n + 1], tile):
            end = min(start + tile, bounds[n + 1])
            position = prefix + start - bounds[n]
            slots = token_table[table_row, : position + end - start]
            part = q[start:end]
            with threads_for(2 * part.numel() * min(KEYS, len(slots))):
                out[start:end] = _attend(part, cache, slots, position, scale, latent)
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
