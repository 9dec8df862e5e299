"""Launches of short_conv/triton.py as torch operators that graphs take. Not run on hardware."""

from __future__ import annotations

import torch

from sglang_k3.kernels import triton_targets
from sglang_k3.kernels.ascend import DEVICE, request_of_row
from sglang_k3.kernels.registry import Call, register
from sglang_k3.kernels.triton_targets import NAME, PREFERENCE, programs, start

_ROWS = 64
"""Rows of a prompt that one item goes through."""
_WIDEST = 512
"""Channels of a block where rows are many and overhead a row counts; 1,024 do not fit a 910B3 twice."""


_TAPS = 4


def refusal(call: Call) -> str | None:
    if (taps := call.dims.get("taps", _TAPS)) != _TAPS:
        return f"it convolves over {_TAPS} tokens, not {taps}"
    return triton_targets.refusal(call)


def _block(channels: int) -> int:
    """Channels a block: as many as divide them, so that no block is half empty (2,304 on 16 ranks)."""
    return _WIDEST if channels % _WIDEST == 0 else _WIDEST // 2


def _taps(weight: torch.Tensor) -> torch.Tensor:
    """weight [C, 4] fp32. Raises ValueError for another width."""
    if weight.shape[1] != _TAPS:
        raise ValueError(
            f"a convolution over {weight.shape[1]} tokens: the Triton kernels take {_TAPS}; "
            "use another implementation"
        )
    return weight.contiguous()


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _packed(*tensors: torch.Tensor) -> None:
    """Raises ValueError for a pool or bank whose rows [rows, C] are not packed: a copy would be written."""
    for x in tensors:
        if x.stride()[-2:] != (x.shape[-1], 1):
            raise ValueError(
                f"a pool or bank of shape {tuple(x.shape)} has strides {x.stride()}; pack its rows"
            )


def _share(requests: int, blocks: int) -> int:
    """Parts that requests are dealt to, so that blocks * parts fill the cores; one holds at least eight
    requests, so that the taps, which each part loads, are no more than an eighth of what it moves."""
    return max(1, min(programs(requests * blocks)[0] // blocks, requests // 8))


@register("short_conv.decode", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
@torch.library.custom_op("sglang_k3::short_conv_decode", mutates_args=("window_pool",))
def decode(
    x: torch.Tensor, weight: torch.Tensor, window_pool: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """See `reference.decode`. Raises ValueError for a convolution over other than four tokens."""
    from sglang_k3.kernels.short_conv import triton as kernels

    requests, channels = x.shape
    _packed(window_pool)
    x, taps, y = _rows(x), _taps(weight), x.new_empty(x.shape)
    block = _block(channels)
    blocks = -(-channels // block)
    if requests:
        parts = _share(requests, blocks)
        start(kernels.decode, blocks * parts)(
            x,
            taps,
            window_pool,
            slots,
            y,
            blocks * parts,
            requests,
            parts,
            x.stride(0),
            window_pool.stride(0),
            C=channels,
            BC=block,
        )
    return y


@torch.library.register_fake("sglang_k3::short_conv_decode")
def _(x, *rest) -> torch.Tensor:
    return x.new_empty(x.shape)


@register("short_conv.verify", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
@torch.library.custom_op("sglang_k3::short_conv_verify", mutates_args=("bank_x",))
def verify(
    x: torch.Tensor,
    weight: torch.Tensor,
    window_pool: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    bank_rows: torch.Tensor,
    bank_x: torch.Tensor,
) -> torch.Tensor:
    """See `reference.verify`."""
    from sglang_k3.kernels.short_conv import triton as kernels

    (tokens, channels), requests = x.shape, len(slots)
    _packed(window_pool, bank_x)
    x, taps, y = _rows(x), _taps(weight), x.new_empty(x.shape)
    block = _block(channels)
    blocks = -(-channels // block)
    if tokens:
        parts = _share(max(requests, 1), blocks)
        start(kernels.verify, blocks * parts)(
            x,
            taps,
            window_pool,
            slots,
            cu_seqlens,
            bank_rows,
            bank_x,
            y,
            blocks * parts,
            requests,
            parts,
            tokens,
            x.stride(0),
            window_pool.stride(0),
            bank_x.stride(0),
            C=channels,
            BC=block,
            WIDTH=bank_x.shape[1],
        )
    return y


@torch.library.register_fake("sglang_k3::short_conv_verify")
def _(x, *rest) -> torch.Tensor:
    return x.new_empty(x.shape)


@register("short_conv.extend", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
@torch.library.custom_op("sglang_k3::short_conv_extend", mutates_args=("window_pool",))
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
    """See `reference.extend`: the rows first, then the windows, which the rows still needed."""
    from sglang_k3.kernels.short_conv import triton as kernels

    tokens, channels = x.shape
    _packed(window_pool)
    x, taps, y = _rows(x), _taps(weight), x.new_empty(x.shape)
    blank = fresh.to(torch.uint8)
    blocks = -(-channels // _WIDEST)
    if tokens:
        request, place, padding = request_of_row(cu_seqlens, tokens)
        nobody = padding | (slots[request] < 0)
        items = blocks * -(-tokens // _ROWS)
        start(kernels.extend, items)(
            x,
            taps,
            window_pool,
            slots,
            blank,
            torch.where(nobody, -1, request),
            place,
            y,
            items,
            tokens,
            x.stride(0),
            window_pool.stride(0),
            C=channels,
            BC=_WIDEST,
            BT=_ROWS,
        )
    pool = window_pool.unsqueeze(0)
    _move(
        pool,
        slots,
        blank,
        x.unsqueeze(0),
        cu_seqlens[:-1],
        cu_seqlens.diff(),
        pool,
        track_offsets,
        track_slots,
    )
    return y


@torch.library.register_fake("sglang_k3::short_conv_extend")
def _(x, *rest) -> torch.Tensor:
    return x.new_empty(x.shape)


@register("short_conv.commit", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
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
    """See `reference.commit`. tracking False: the host knows that no checkpoint lies in these runs."""
    same = track_pools.data_ptr() == window_pools.data_ptr() and track_pools.shape == window_pools.shape
    # An operator may not be given one tensor as two that it writes.
    other = None if same else track_pools
    numbers = slots, bank_rows, bank_x, counts, other, track_offsets, track_slots, tracking
    commit_windows(window_pools, *numbers)


@torch.library.custom_op("sglang_k3::short_conv_commit", mutates_args=("window_pools", "track_pools"))
def commit_windows(
    window_pools: torch.Tensor,
    slots: torch.Tensor,
    bank_rows: torch.Tensor,
    bank_x: torch.Tensor,
    counts: torch.Tensor,
    track_pools: torch.Tensor | None,
    track_offsets: torch.Tensor,
    track_slots: torch.Tensor,
    tracking: bool,
) -> None:
    """`commit`; track_pools None: checkpoints go to window_pools."""
    _packed(window_pools, bank_x)
    tracks = window_pools if track_pools is None else track_pools
    _move(window_pools, slots, None, bank_x, bank_rows, counts, tracks, track_offsets, track_slots, tracking)


@torch.library.register_fake("sglang_k3::short_conv_commit")
def _(*arguments) -> None:
    return None


def _move(
    pools: torch.Tensor,
    slots: torch.Tensor,
    blank: torch.Tensor | None,
    rows: torch.Tensor,
    firsts: torch.Tensor,
    counts: torch.Tensor,
    track_pools: torch.Tensor,
    track_offsets: torch.Tensor,
    track_slots: torch.Tensor,
    tracking: bool = True,
) -> None:
    """Launch `windows`. rows: x [1, T, C] of a prefill, whose blank [N] u8 says which windows are zero, or
    the banks [L, B, D, C] of a commit (blank None)."""
    from sglang_k3.kernels.short_conv import triton as kernels

    layers, _, _, channels = pools.shape
    block = _block(channels)
    if items := layers * len(slots) * -(-channels // block):
        start(kernels.windows, items)(
            pools,
            slots,
            slots if blank is None else blank,
            rows,
            firsts,
            counts,
            track_pools,
            track_offsets,
            track_slots,
            items,
            len(slots),
            pools.stride(0),
            pools.stride(1),
            track_pools.stride(0),
            track_pools.stride(1),
            rows.stride(0),
            rows.stride(1),
            rows.stride(-2),
            C=channels,
            BC=block,
            FRESH=blank is not None,
            TRACK=tracking,
        )
