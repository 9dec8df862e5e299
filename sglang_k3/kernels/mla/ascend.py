"""Paged latent attention on an Ascend NPU, whose pool keeps latent and rope columns apart.

Lengths stay on the device; the host says only how far the longest request reaches, which bounds the work
and never the result.
"""

from __future__ import annotations

import torch

from sglang_k3.kernels.ascend import DEVICE, request_of_row
from sglang_k3.kernels.registry import Call, register

_KEYS = 2048
"""Cached positions gathered at a time."""


@register("mla.paged_attention", "npu torch", preference=10, device=DEVICE)
def paged_attention(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    token_table: torch.Tensor,
    request_rows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prefix_lens: torch.Tensor,
    scale: float,
    latent: int,
    *,
    reach: int,
    width: int,
) -> torch.Tensor:
    """See `reference.paged_attention`, but for the cache, which comes in two parts: [S, latent], [S, R].

    reach: at least as many positions as the longest request has, its new rows included; width: at least as
    many new rows as any request has. Both bound the work alone.
    """
    requests, (tokens, heads, columns) = len(request_rows), q.shape
    request, place, padding = request_of_row(cu_seqlens, tokens)
    grid = q.new_zeros(requests + 1, width, heads, columns)
    # Padding lands behind the last request.
    grid[torch.where(padding, requests, request), torch.where(padding, 0, place)] = q
    counts = cu_seqlens.diff()
    out = _grid_attention(grid[:-1], cache, token_table, request_rows, counts, prefix_lens, scale, reach)
    return out[request, place.clamp(max=width - 1)].masked_fill(padding.view(-1, 1, 1), 0.0).to(q.dtype)


def _grid_attention(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    token_table: torch.Tensor,
    request_rows: torch.Tensor,
    counts: torch.Tensor,
    prefix_lens: torch.Tensor,
    scale: float,
    reach: int,
) -> torch.Tensor:
    """q [N, W, H, L + R], of which counts [N] rows of each request are real -> [N, W, H, L] fp32."""
    requests, rows, heads, _ = q.shape
    latent = cache[0].shape[-1]
    query = q.float().flatten(1, 2)
    top = query.new_full((requests, rows * heads, 1), float("-inf"))
    total, mixed = torch.zeros_like(top), query.new_zeros(requests, rows * heads, latent)
    row = torch.arange(rows, device=q.device)
    last = (prefix_lens.unsqueeze(1) + row).repeat_interleave(heads, dim=1).unsqueeze(2)
    for first in range(0, reach, _KEYS):
        span = min(_KEYS, reach - first)
        position = torch.arange(first, first + span, device=q.device)
        written = position < (prefix_lens + counts).unsqueeze(1)
        slots = token_table[:, first : first + span][request_rows].long().masked_fill(~written, 0)
        # Unwritten rows may hold anything; their share is zero, and NaN times zero is not.
        values, ropes = (part[slots].float().masked_fill(~written.unsqueeze(2), 0.0) for part in cache)
        scores = query[..., :latent] @ values.transpose(1, 2) + query[..., latent:] @ ropes.transpose(1, 2)
        scores = (scale * scores).masked_fill(position > last, float("-inf"))
        highest = torch.maximum(top, scores.amax(-1, keepdim=True))
        keep, share = (top - highest).exp(), (scores - highest).exp()
        total = total * keep + share.sum(-1, keepdim=True)
        mixed = mixed * keep + share @ values
        top = highest
    return (mixed / total).view(requests, rows, heads, latent)


def padded_heads(heads: int) -> int:
    """Heads that CANN's fused attention computes for these: the next power of two, up to 128."""
    size = 1
    while size < heads:
        size *= 2
    return size


def fused_supports(call: Call) -> str | None:
    """Of npu_fused_infer_attention_score_v2 in its latent form."""
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 or float16, not {call.dtype}"
    for name, wanted in (("latent", 512), ("rope", 64), ("page", 128)):
        if (found := call.dims.get(name, wanted)) != wanted:
            return f"its latent form has {name} {wanted}, not {found}"
    heads = call.dims.get("heads", 1)
    if padded_heads(heads) > 128:
        return f"{heads} heads are more than 128"
    return None
