"""`kda.verify` and `kda.commit` as a server has them that keeps no records: every drafted row's state is
stored, and the accepted one copied back.

For the ablation only, with the plain form of the records and every row verified. The layers' buffers stay,
as a server's pool of them would.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import snapshots

_kept: dict[int, torch.Tensor] = {}
"""[N, D, H, V, K] fp32 by the address of a layer's states."""


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    """See `sglang_k3.kernels.kda.reference.verify`; records are not written."""
    requests, rows = len(slots), len(v) // max(1, len(slots))
    assert torch.equal(cu_seqlens, torch.arange(requests + 1, dtype=cu_seqlens.dtype) * rows)
    kept = _kept.get(state_pool.data_ptr())
    if kept is None or kept.shape[0] < requests or kept.shape[1] != rows:
        kept = _kept[state_pool.data_ptr()] = torch.empty(requests, rows, *state_pool.shape[1:])
    # A row of padding has no slot: it reads slot 0's state, and nothing is written back.
    at, scale = slots.clamp(min=0), rest[-1]
    return snapshots.verify(q, k, v, g, beta, state_pool, at, kept[:requests], scale).to(v.dtype)


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
) -> None:
    """See `sglang_k3.kernels.kda.reference.commit`; the states are those that the last verify kept."""
    live = (slots >= 0) & (counts > 0)
    crossed = live & (track_slots >= 0) & (track_offsets >= 1) & (track_offsets <= counts)
    for states in state_pools:
        kept = _kept[states.data_ptr()][: len(slots)]
        _restore(states, target_slots, counts, kept, live)
        _restore(states, track_slots, track_offsets, kept, crossed)


def _restore(
    states: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, kept: torch.Tensor, rows: torch.Tensor
) -> None:
    if not rows.all():
        slots, counts, kept = slots[rows], counts[rows], kept[rows]
    snapshots.restore(states, slots, counts, kept)
