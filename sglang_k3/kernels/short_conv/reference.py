"""Causal depthwise convolution over the last W tokens, then SiLU: the oracle, one request at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_k3.kernels.registry import register


@register("short_conv.extend", "reference", preference=0, device="any")
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
    """y_t = SiLU(sum_j weight[:, j] * x_{t - (W - 1) + j}); the last tap is the current token.

    Args:
        x: [T, C], the tokens of all requests one after another; rows from cu_seqlens[-1] on are padding.
        weight: [C, W] fp32.
        window_pool: [S, W - 1, C], the rows before a request's first token, oldest first; updated in place.
        slots: [N] int64; -1 reads and writes nothing and its outputs are zero.
        cu_seqlens: [N + 1] int64 token offsets.
        fresh: [N] bool; the window starts as zeros, whatever the slot holds.
        track_offsets: [N] int64, 0..length or -1: after so many tokens the window is also kept in
        track_slots: [N] int64 (-1: not kept).

    Returns:
        y [T, C] in x's dtype; padding rows are zero. Sums in fp32 (fp64 for fp64 x).
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros_like(x)
    width = weight.shape[1]
    kernel = weight.to(compute).unsqueeze(1)
    for n, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        begin, end = int(cu_seqlens[n]), int(cu_seqlens[n + 1])
        window = window_pool[slot]
        before = torch.zeros_like(window) if fresh[n] else window.clone()
        rows = torch.cat([before.to(compute), x[begin:end].to(compute)])
        if end > begin:
            mixed = F.conv1d(rows.t().unsqueeze(0), kernel, groups=weight.shape[0])
            y[begin:end] = F.silu(mixed[0].t()).to(x.dtype)
        offset, track = int(track_offsets[n]), int(track_slots[n])
        if offset >= 0 and track >= 0:
            window_pool[track] = rows[offset : offset + width - 1].to(window_pool.dtype)
        window_pool[slot] = rows[end - begin :].to(window_pool.dtype)
    return y


@register("short_conv.decode", "reference", preference=0, device="any")
def decode(
    x: torch.Tensor, weight: torch.Tensor, window_pool: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """`extend` with one token for each request: x [N, C] -> y [N, C]; window_pool moves on by one row."""
    requests = slots.shape[0]
    untracked = torch.full_like(slots, -1)
    return extend(
        x,
        weight,
        window_pool,
        slots,
        torch.arange(requests + 1, device=slots.device),
        torch.zeros(requests, dtype=torch.bool, device=slots.device),
        untracked,
        untracked,
    )


@register("short_conv.verify", "reference", preference=0, device="any")
def verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    window_pool: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    bank_rows: torch.Tensor,
    bank_x: torch.Tensor,
) -> torch.Tensor:
    """`extend` without writing a window: the rows of drafted tokens go to a bank instead.

    Args (the others as in `extend`):
        window_pool: [S, W - 1, C], only read.
        bank_rows: [N] int64, the row of each request in the bank (its running-request row).
        bank_x: [R, D, C] in the windows' dtype; row i of a request is the x of its token i (at most D).

    Returns:
        y [T, C] in x's dtype. A request without a slot leaves nothing in the bank.
    """
    untracked = torch.full_like(slots, -1)
    fresh = torch.zeros_like(slots, dtype=torch.bool)
    y = extend(x, weight, window_pool.clone(), slots, cu_seqlens, fresh, untracked, untracked)
    for n, slot in enumerate(slots.tolist()):
        if slot >= 0:
            rows = x[int(cu_seqlens[n]) : int(cu_seqlens[n + 1])]
            bank_x[int(bank_rows[n]), : rows.shape[0]] = rows.to(bank_x.dtype)
    return y


@register("short_conv.commit", "reference", preference=0, device="any")
def commit(
    window_pools: torch.Tensor,
    slots: torch.Tensor,
    bank_rows: torch.Tensor,
    bank_x: torch.Tensor,
    counts: torch.Tensor,
    track_pools: torch.Tensor,
    track_offsets: torch.Tensor,
    track_slots: torch.Tensor,
) -> None:
    """The first counts[n] rows in the bank enter the windows of all layers.

    Args:
        window_pools: [L, S, W - 1, C], updated in place. bank_x: [L, R, D, C], the same dtype.
        slots, track_slots: [N] int64, -1 for none. bank_rows, counts (0..D), track_offsets: [N] int64.
        track_pools: [L, S', W - 1, C]: the window after track_offsets[n] of the rows is also kept in its
        track_slots[n], unless the offset is below 0 or beyond counts[n], or nothing is committed. The same
        tensor as window_pools, or another.
    """
    kept = window_pools.shape[2]
    for n, slot in enumerate(slots.tolist()):
        count, offset, track = int(counts[n]), int(track_offsets[n]), int(track_slots[n])
        if slot < 0 or count == 0:
            continue
        rows = torch.cat([window_pools[:, slot], bank_x[:, int(bank_rows[n]), :count]], dim=1)
        if track >= 0 and 0 <= offset <= count:
            track_pools[:, track] = rows[:, offset : offset + kept]
        window_pools[:, slot] = rows[:, count:]
