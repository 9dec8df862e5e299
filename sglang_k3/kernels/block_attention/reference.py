"""Attention of a drafted block over its request's context and itself: the oracle, one request at a time."""

from __future__ import annotations

import torch

from sglang_k3.kernels.registry import register


@register("block_attention", "reference", preference=0, device="any")
def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    token_table: torch.Tensor,
    request_rows: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """softmax(scale q K^T) V for the B rows of each block (DSpark, arXiv 2607.05147: drafting a block).

    Args:
        q: [N, B, H, D]; k, v: [N, B, G, D], the block's own rows, H a multiple of G (grouped queries).
        k_cache, v_cache: [P, G, D], the context's rows, written by token slot; only read.
        token_table: [R, max_len] int32 or int64, the slot of each position; request_rows: [N] int64, its row.
        context_lens: [N] int64, how many positions of the context there are (0 is fine).
        scale: applied to the scores. causal: row i of a block sees rows 0..i of it, else all B.

    Returns:
        [N, B, H, D] in q's dtype; computed in fp32 (fp64 for fp64 q).
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    requests, rows, heads, _ = q.shape
    group = heads // k.shape[2]
    out = torch.empty_like(q)
    for n in range(requests):
        length = int(context_lens[n])
        slots = token_table[int(request_rows[n]), :length].long()
        keys = torch.cat([k_cache[slots].to(compute), k[n].to(compute)]).repeat_interleave(group, 1)
        values = torch.cat([v_cache[slots].to(compute), v[n].to(compute)]).repeat_interleave(group, 1)
        scores = scale * torch.einsum("bhd,thd->hbt", q[n].to(compute), keys)
        if causal:
            later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
            scores[:, :, length:].masked_fill_(later, float("-inf"))
        out[n] = torch.einsum("hbt,thd->bhd", scores.softmax(-1), values).to(out.dtype)
    return out
