"""Paged latent attention on an Ascend NPU, whose pool keeps latent and rope columns apart.

Lengths stay on the device; the host says only how far the longest request reaches, which bounds the work
and never the result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_k3.kernels.ascend import DEVICE, request_of_row
from sglang_k3.kernels.registry import register

HostLengths = Callable[[], tuple[list[int], list[int]]]
"""New rows of each request, and its positions with them, known to the host; asking may wait for a copy."""

_KEYS = 2048
"""Cached positions gathered at a time."""


class Grid:
    """Packed rows [T, ...] as [N, width, ...] and back; rows past cu_seqlens[-1] are padding."""

    def __init__(self, cu_seqlens: torch.Tensor, rows: int, width: int) -> None:
        self._shape = len(cu_seqlens) - 1, width
        self._request, self._place, self._padding = request_of_row(cu_seqlens, rows)

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """Places without a row are zero."""
        requests, width = self._shape
        grid = rows.new_zeros(requests + 1, width, *rows.shape[1:])
        # Padding lands behind the last request.
        request = torch.where(self._padding, requests, self._request)
        grid[request, torch.where(self._padding, 0, self._place)] = rows
        return grid[:-1]

    def gather(self, grid: torch.Tensor) -> torch.Tensor:
        """Rows of padding are zero, whatever stands in the grid."""
        rows = grid[self._request, self._place.clamp(max=self._shape[1] - 1)]
        return rows.masked_fill(self._padding.view(-1, *[1] * (rows.dim() - 1)), 0.0)


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
    lengths: HostLengths | None = None,
) -> torch.Tensor:
    """See `reference.paged_attention`, but for the cache, which comes in two parts: [S, latent], [S, R].

    reach: at least as many positions as the longest request has, its new rows included; width: at least as
    many new rows as any request has. Both bound the work alone. lengths: not asked for.
    """
    grid = Grid(cu_seqlens, q.shape[0], width)
    counts = cu_seqlens.diff()
    out = _grid_attention(grid.spread(q), cache, token_table, request_rows, counts, prefix_lens, scale, reach)
    return grid.gather(out).to(q.dtype)


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
