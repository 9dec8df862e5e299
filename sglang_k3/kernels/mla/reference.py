"""Oracle of paged latent attention (MLA in its absorbed form, arXiv 2405.04434 section 2.1)."""

from __future__ import annotations

import torch

from sglang_k3.kernels import registry


@registry.register("mla.paged_attention", "reference", preference=0, device="any")
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
    """Causal attention of each request's new rows over its cached rows -> [T, H, latent] in q's dtype.

    q [T, H, latent + R] absorbed queries; cache [slots, latent + R], keys whole, values the first
    `latent` columns, new rows already written; token_table [requests, positions] slot of each position;
    request_rows [N] i64 rows of that table; cu_seqlens [N + 1] i64 bounds of the requests' rows in q;
    prefix_lens [N] i64 positions before the first new row. Row i of request n sees positions
    0 .. prefix_lens[n] + i. Rows of q past cu_seqlens[-1] are padding and give zeros.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(q.shape[0], q.shape[1], latent)
    bounds = cu_seqlens.tolist()
    for n, (prefix, table_row) in enumerate(zip(prefix_lens.tolist(), request_rows.tolist(), strict=True)):
        start, end = bounds[n], bounds[n + 1]
        length = prefix + end - start
        keys = cache[token_table[table_row, :length].long()].to(wide)
        scores = torch.einsum("thd,pd->htp", q[start:end].to(wide), keys) * scale
        position = torch.arange(length, device=q.device)
        seen = position <= position[prefix:].unsqueeze(1)
        share = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
        out[start:end] = torch.einsum("htp,pl->thl", share, keys[:, :latent]).to(q.dtype)
    return out
