"""block_attention on an Ascend NPU, in torch operators: blocks of the context with a running softmax."""

from __future__ import annotations

import torch

from sglang_k3.kernels.ascend import DEVICE
from sglang_k3.kernels.registry import register

_KEYS = 2048
"""Positions of the context gathered at a time, for all requests."""


@register("block_attention", "npu torch", preference=10, device=DEVICE)
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
    """See `reference.block_attention`. token_table's columns bound the work: hand over no more than the
    longest request needs."""
    requests, rows, heads, width = q.shape
    groups = k.shape[2]
    query = q.float().view(requests, rows, groups, heads // groups, width).permute(0, 2, 3, 1, 4)
    top = query.new_full((*query.shape[:-1], 1), float("-inf"))
    total, mixed = torch.zeros_like(top), torch.zeros_like(query)

    def add(keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> None:
        """keys, values [N, P, G, D]; seen [N or 1, 1 or B, P] bool."""
        nonlocal top, total, mixed
        scores = scale * query @ keys.float().permute(0, 2, 3, 1).unsqueeze(2)
        hidden = ~seen.unsqueeze(1).unsqueeze(1)
        scores = scores.masked_fill(hidden, float("-inf"))
        highest = torch.maximum(top, scores.amax(-1, keepdim=True))
        # A row that has seen nothing yet has no highest score to subtract.
        base = highest.masked_fill(highest == float("-inf"), 0.0)
        keep, share = (top - base).exp(), (scores - base).exp()
        total = total * keep + share.sum(-1, keepdim=True)
        mixed = mixed * keep + share @ values.float().transpose(1, 2).unsqueeze(2)
        top = highest

    lengths = context_lens.view(-1, 1, 1)
    for first in range(0, token_table.shape[1], _KEYS):
        slots = token_table[:, first : first + _KEYS][request_rows].long()
        position = torch.arange(first, first + slots.shape[1], device=q.device)
        seen = position < lengths
        slots = slots.masked_fill(~seen.squeeze(1), 0)
        # Unwritten rows may hold anything; their share is zero, and NaN times zero is not.
        unseen = ~seen.squeeze(1)[..., None, None]
        add(k_cache[slots].masked_fill(unseen, 0), v_cache[slots].masked_fill(unseen, 0), seen)
    own = torch.ones(rows, rows, dtype=torch.bool, device=q.device)
    add(k, v, (own.tril() if causal else own).unsqueeze(0))
    return (mixed / total).permute(0, 3, 1, 2, 4).reshape(q.shape).to(q.dtype)
