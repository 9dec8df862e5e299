"""Launches of kda/triton.py as torch operators, which graphs take: no value of a tensor is read by the host.

Triton is imported by the first call, because every process loads the registry. Not run on hardware.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_k3.kernels.ascend import DEVICE
from sglang_k3.kernels.registry import register
from sglang_k3.kernels.triton_targets import NAME, PREFERENCE, power_of_two, programs, refusal, start, target


def packed_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, C] with packed heads: itself, also as columns of a wider tensor, or a copy."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def require_packed(*tensors: torch.Tensor) -> None:
    """Raises ValueError for a pool or bank whose rows [H, ...] are not packed: a copy would be written."""
    for x in tensors:
        if not x[(0,) * (x.dim() - 3)].is_contiguous():
            raise ValueError(
                f"a pool or bank of shape {tuple(x.shape)} has strides {x.stride()}; pack its rows"
            )


def tiles(value_dim: int, states: int, *, cube: bool = False) -> tuple[int, int]:
    """(rows of V a tile, tiles of a head) for so many heads' states: half the rows where cores stayed idle.

    Each tile loads keys, queries and decays of its own, so larger ones move fewer bytes.
    """
    rows = target().value_rows
    count = -(-value_dim // rows)
    if states * count > programs(states * count, cube=cube)[0]:
        return rows, count
    return rows // 2, -(-value_dim // (rows // 2))


@register("kda.decode", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
@torch.library.custom_op("sglang_k3::kda_decode", mutates_args=("state_pool",))
def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See `reference.decode`. Raises ValueError for a K that is no power of two."""
    from sglang_k3.kernels.kda import triton as kernels

    requests, heads, value_dim = v.shape
    key_dim = power_of_two("K", k.shape[2])
    require_packed(state_pool[0])
    q, k, v = packed_rows(q), packed_rows(k), packed_rows(v)
    out = v.new_empty(requests, heads, value_dim)
    rows, count = tiles(value_dim, requests * heads)
    if items := requests * heads * count:
        start(kernels.decode, items)(
            q,
            k,
            v,
            g.contiguous(),
            beta.contiguous(),
            state_pool,
            slots,
            out,
            scale,
            items,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            state_pool.stride(0),
            H=heads,
            K=key_dim,
            V=value_dim,
            BV=rows,
        )
    return out


@torch.library.register_fake("sglang_k3::kda_decode")
def _(q, k, v, g, beta, state_pool, slots, scale) -> torch.Tensor:
    return v.new_empty(v.shape)


def launch_verify(
    kernel: Any,
    inputs: tuple[torch.Tensor, ...],
    state_pool: torch.Tensor,
    batch: tuple[torch.Tensor, ...],
    banks: tuple[torch.Tensor, ...],
    pending: tuple[torch.Tensor, ...],
    scale: float,
    *,
    cube: bool = False,
    **constants: int,
) -> torch.Tensor:
    """A form of verify: `reference.verify`'s inputs (q, k, v, g, beta), batch (slots, cu_seqlens, bank_rows),
    banks (u, k, g) and pending (starts, tails, fold_slots); constants beside the sizes."""
    q, k, v = map(packed_rows, inputs[:3])
    g, beta = (x.contiguous() for x in inputs[3:])
    tokens, heads, value_dim = v.shape
    key_dim, requests = power_of_two("K", k.shape[2]), len(batch[0])
    require_packed(state_pool[0], *banks)
    # Rows of padding, and of requests without a slot, are nobody's.
    out = v.new_zeros(tokens, heads, value_dim)
    rows, count = tiles(value_dim, requests * heads, cube=cube)
    if items := requests * heads * count:
        strides = (x.stride(0) for x in (q, k, v, state_pool, *banks))
        start(kernel, items, cube=cube)(
            q,
            k,
            v,
            g,
            beta,
            state_pool,
            *batch,
            *banks,
            *pending,
            out,
            scale,
            items,
            *strides,
            H=heads,
            K=key_dim,
            V=value_dim,
            BV=rows,
            RING=banks[0].shape[1],
            **constants,
        )
    return out


@register("kda.verify", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
@torch.library.custom_op("sglang_k3::kda_verify", mutates_args=("state_pool", "bank_u", "bank_k", "bank_g"))
def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    bank_rows: torch.Tensor,
    bank_u: torch.Tensor,
    bank_k: torch.Tensor,
    bank_g: torch.Tensor,
    starts: torch.Tensor,
    tails: torch.Tensor,
    fold_slots: torch.Tensor,
    scale: float,
    width: int | None = None,
) -> torch.Tensor:
    """See `reference.verify`. width: the most new rows of a request, known to the host; a tail is at most
    what it leaves of the ring. Left out, it is the ring's rows, and there is no tail."""
    from sglang_k3.kernels.kda import triton as kernels

    ring = bank_u.shape[1]
    width = ring if width is None else width
    return launch_verify(
        kernels.verify,
        (q, k, v, g, beta),
        state_pool,
        (slots, cu_seqlens, bank_rows),
        (bank_u, bank_k, bank_g),
        (starts, tails, fold_slots),
        scale,
        WIDTH=width,
        TAIL=ring - width,
    )


@torch.library.register_fake("sglang_k3::kda_verify")
def _(q, k, v, *rest) -> torch.Tensor:
    return v.new_empty(v.shape)


@register("kda.commit", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
@torch.library.custom_op("sglang_k3::kda_commit", mutates_args=("state_pools",))
def commit(
    state_pools: torch.Tensor,
    slots: torch.Tensor,
    target_slots: torch.Tensor,
    bank_rows: torch.Tensor,
    bank_u: torch.Tensor,
    bank_k: torch.Tensor,
    bank_g: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    track_offsets: torch.Tensor,
    track_slots: torch.Tensor,
    tracking: bool = True,
) -> None:
    """See `reference.commit`. tracking False: the host knows that no checkpoint lies in these runs."""
    from sglang_k3.kernels.kda import triton as kernels

    layers, _, heads, value_dim, key_dim = state_pools.shape
    ring = bank_u.shape[2]
    require_packed(state_pools[0, 0], bank_u, bank_k, bank_g)
    rows, count = tiles(value_dim, layers * len(slots) * heads)
    if items := layers * len(slots) * heads * count:
        start(kernels.commit, items)(
            state_pools,
            slots,
            target_slots,
            bank_rows,
            bank_u,
            bank_k,
            bank_g,
            starts,
            counts,
            track_offsets,
            track_slots,
            items,
            len(slots),
            state_pools.stride(0),
            state_pools.stride(1),
            bank_u.stride(0),
            bank_k.stride(0),
            bank_g.stride(0),
            bank_u.stride(1),
            bank_k.stride(1),
            bank_g.stride(1),
            H=heads,
            K=power_of_two("K", key_dim),
            V=value_dim,
            BV=rows,
            RING=ring,
            STEPS=ring,
            TRACK=tracking,
        )


@torch.library.register_fake("sglang_k3::kda_commit")
def _(*arguments) -> None:
    return None
