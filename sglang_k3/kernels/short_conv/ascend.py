"""short_conv on an Ascend NPU, in torch operators: gathers of a batch's own slots, never of the pool.

sgl_kernel_npu's causal_conv1d writes drafted rows into the live window, which has to be rolled back, and
wants a window as wide as the draft; these leave the window alone until rows are accepted.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_k3.kernels.ascend import DEVICE, present, put, request_of_row
from sglang_k3.kernels.registry import register


def _taps(x: torch.Tensor, history: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor):
    """x [T, C], history [N, W - 1, C], weight [C, W] -> y [T, C] fp32, zero for padding rows."""
    kept, width = history.shape[1], weight.shape[1]
    request, place, padding = request_of_row(cu_seqlens, x.shape[0])
    before = history.flatten(0, 1).float()
    rows = torch.cat([before, x.float()])
    y = torch.zeros_like(x, dtype=torch.float32)
    current = torch.arange(x.shape[0], device=x.device) + before.shape[0]
    for tap in range(width):
        back = width - 1 - tap
        # A row before the request's first token stands in its history, the latest one last.
        source = torch.where(place >= back, current - back, request * kept + kept - back + place)
        y += rows[source] * weight[:, tap].float()
    return F.silu(y).masked_fill(padding.unsqueeze(1), 0.0)


def _window_after(
    x: torch.Tensor, history: torch.Tensor, begins: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """The last W - 1 rows of (history, then counts [N] rows of x from begins [N] on) -> [N, W - 1, C]."""
    requests, kept, _ = history.shape
    place = counts.unsqueeze(1) - kept + torch.arange(kept, device=x.device)
    older = (torch.arange(requests, device=x.device) * kept).unsqueeze(1) + place + kept
    newer = requests * kept + begins.unsqueeze(1) + place
    rows = torch.cat([history.flatten(0, 1), x.to(history.dtype)])
    return rows[torch.where(place >= 0, newer, older)]


def _history(window_pool: torch.Tensor, slots: torch.Tensor, fresh: torch.Tensor | None) -> torch.Tensor:
    history = window_pool[present(slots)[1]]
    return history if fresh is None else history.masked_fill(fresh.view(-1, 1, 1), 0)


def _silence(y: torch.Tensor, slots: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Zero the outputs of requests without a slot."""
    request, _, _ = request_of_row(cu_seqlens, y.shape[0])
    return y.masked_fill((slots < 0)[request].unsqueeze(1), 0.0)


@register("short_conv.extend", "npu torch", preference=10, device=DEVICE)
def extend(
    x: torch.Tensor,
    weight: torch.Tensor,
    window_pool: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    fresh: torch.Tensor,
    track_offsets: torch.Tensor,
    track_slots: torch.Tensor,
) -> torch.Tensor:
    """See `reference.extend`."""
    history = _history(window_pool, slots, fresh)
    y = _silence(_taps(x, history, weight, cu_seqlens), slots, cu_seqlens)
    begins, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    tracked = torch.where((track_offsets >= 0) & (slots >= 0), track_slots, -1)
    put(window_pool, tracked, _window_after(x, history, begins, track_offsets.clamp(min=0)))
    put(window_pool, slots, _window_after(x, history, begins, lengths))
    return y.to(x.dtype)


@register("short_conv.decode", "npu torch", preference=10, device=DEVICE)
def decode(
    x: torch.Tensor, weight: torch.Tensor, window_pool: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """See `reference.decode`."""
    kept, places = present(slots)
    before = window_pool[places]
    rows = torch.cat([before, x.unsqueeze(1).to(before.dtype)], dim=1)
    exact = torch.cat([before.float(), x.unsqueeze(1).float()], dim=1)
    y = F.silu((exact * weight.t().float()).sum(1))
    window_pool[places] = torch.where(kept.view(-1, 1, 1), rows[:, 1:], before)
    return y.masked_fill(~kept.unsqueeze(1), 0.0).to(x.dtype)


@register("short_conv.verify", "npu torch", preference=10, device=DEVICE)
def verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    window_pool: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    bank_rows: torch.Tensor,
    bank_x: torch.Tensor,
) -> torch.Tensor:
    """See `reference.verify`. Rows of padding and of requests without a slot go to bank row 0, which is
    padding's."""
    history = _history(window_pool, slots, None)
    y = _silence(_taps(x, history, weight, cu_seqlens), slots, cu_seqlens)
    request, place, padding = request_of_row(cu_seqlens, x.shape[0])
    nobody = padding | (slots[request] < 0)
    row = torch.where(nobody, 0, bank_rows[request])
    bank_x[row, torch.where(nobody, 0, place)] = x.to(bank_x.dtype)
    return y.to(x.dtype)


@register("short_conv.commit", "npu torch", preference=10, device=DEVICE)
def commit(
    window_pools: torch.Tensor,
    slots: torch.Tensor,
    bank_rows: torch.Tensor,
    bank_x: torch.Tensor,
    counts: torch.Tensor,
    track_pools: torch.Tensor,
    track_offsets: torch.Tensor,
    track_slots: torch.Tensor,
    tracking: bool = True,
) -> None:
    """See `reference.commit`: all layers by one gather and one scatter. tracking: as in `kda.commit`."""
    kept = window_pools.shape[2]
    _, places = present(slots)
    rows = torch.cat([window_pools[:, places], bank_x[:, bank_rows]], dim=2)
    some = (slots >= 0) & (counts > 0)
    tracks = some & (track_offsets >= 0) & (track_offsets <= counts)
    step = torch.arange(kept, device=rows.device)
    request = torch.arange(len(slots), device=rows.device).unsqueeze(1)
    places_after = [(window_pools, torch.where(some, slots, -1), counts.clamp(min=0))]
    if tracking:
        places_after.append((track_pools, torch.where(tracks, track_slots, -1), track_offsets.clamp(min=0)))
    for pools, targets, offsets in places_after:
        wanted, at = present(targets)
        window = rows[:, request, offsets.unsqueeze(1) + step]
        pools[:, at] = torch.where(wanted.view(1, -1, 1, 1), window, pools[:, at])
