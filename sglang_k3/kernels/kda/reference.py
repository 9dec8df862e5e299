"""Kimi Delta Attention, token by token: the oracle (arXiv 2510.26692).

For each head, with S [V, K] (the transpose of the paper's state), decay d = e^g over K:
    S <- S * d;   u = beta (v - S k);   S <- S + u k^T;   o = S q
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_k3.kernels.registry import register

NORM_EPS = 1e-6
"""Added to the sum of squares (not the mean) before the root, when q and k are L2-normalised."""


@register("kda.gate", "reference", preference=0, device="any")
def gate(
    f: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and step size from the two projections.

    Args:
        f: [T, H*K], the decay projection.
        b: [T, H], the step projection.
        A_log: [H] fp32 (a checkpoint stores more: pass this rank's slice).
        dt_bias: [H*K] fp32.
        lower_bound: the safe gate's bound, such as -5.0: g = bound * sigmoid(exp(A_log) (f + dt_bias)).
            None: g = -exp(A_log) softplus(f + dt_bias), not bounded.

    Returns:
        g [T, H, K] log decay (<= 0) and beta [T, H] = sigmoid(b), both fp32 (fp64 for fp64 f).
    """
    compute = torch.promote_types(f.dtype, torch.float32)
    heads = A_log.shape[0]
    shifted = (f.to(compute) + dt_bias.to(compute)).view(f.shape[0], heads, -1)
    rate = A_log.to(compute).exp().view(heads, 1)
    g = -rate * F.softplus(shifted) if lower_bound is None else lower_bound * (rate * shifted).sigmoid()
    return g, b.to(compute).sigmoid()


def _normalise(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


@register("kda.extend", "reference", preference=0, device="any")
def extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    fresh: torch.Tensor,
    track_offsets: torch.Tensor,
    track_slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The recurrence over each request's tokens, its state taken from and put back to the pool.

    Args:
        q, k: [T, H, K] raw: each head's row is L2-normalised here, then q is multiplied by scale.
        v: [T, H, V]. Rows of q, k, v, g, beta from cu_seqlens[-1] on are padding.
        g: [T, H, K] log decay; beta: [T, H] (both from `gate`).
        state_pool: [S, H, V, K] fp32 (or bf16: read as fp32, rounded after every token); updated in place.
        slots: [N] int64; -1 reads and writes nothing and its outputs are zero.
        cu_seqlens: [N + 1] int64 token offsets.
        fresh: [N] bool; the state starts as zeros, whatever the slot holds.
        track_offsets: [N] int64, 0..length or -1: the state after so many tokens is also kept in
        track_slots: [N] int64 (-1: not kept).
        scale: applied to q, usually K ** -0.5.

    Returns:
        o [T, H, V] in v's dtype; padding rows are zero. Computed in fp32 (fp64 for fp64 v).
    """
    compute = torch.promote_types(v.dtype, torch.float32)
    o = torch.zeros_like(v)
    q, k, v, decay, beta = (t.to(compute) for t in (q, k, v, g.to(compute).exp(), beta))
    q, k = _normalise(q) * scale, _normalise(k)
    for n, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        begin, end = int(cu_seqlens[n]), int(cu_seqlens[n + 1])
        stored = torch.zeros_like(state_pool[slot]) if fresh[n] else state_pool[slot].clone()
        for count in range(end - begin + 1):
            if count == track_offsets[n] and track_slots[n] >= 0:
                state_pool[track_slots[n]] = stored
            if count == end - begin:
                break
            t = begin + count
            state = stored.to(compute) * decay[t].unsqueeze(1)
            u = beta[t].unsqueeze(1) * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
            state = state + torch.einsum("hv,hk->hvk", u, k[t])
            o[t] = torch.einsum("hvk,hk->hv", state, q[t]).to(o.dtype)
            stored = state.to(state_pool.dtype)
        state_pool[slot] = stored
    return o


@register("kda.decode", "reference", preference=0, device="any")
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
    """`extend` with one token for each request: T = N."""
    requests = slots.shape[0]
    untracked = torch.full_like(slots, -1)
    return extend(
        q,
        k,
        v,
        g,
        beta,
        state_pool,
        slots,
        torch.arange(requests + 1, device=slots.device),
        torch.zeros(requests, dtype=torch.bool, device=slots.device),
        untracked,
        untracked,
        scale,
    )


def _replayed(stored: torch.Tensor, u: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """A state [..., V, K] behind one recorded token: u [..., V], k (raw) and g [..., K]."""
    compute = torch.promote_types(u.dtype, torch.float32)
    key = _normalise(k.to(compute))
    state = stored.to(compute) * g.to(compute).exp().unsqueeze(-2)
    return (state + torch.einsum("...v,...k->...vk", u.to(compute), key)).to(stored.dtype)


@register("kda.verify", "reference", preference=0, device="any")
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
) -> torch.Tensor:
    """`extend` without writing a state: drafted tokens leave a record each instead.

    A request's records are a ring of R rows. Its tail, tails[n] accepted tokens from row starts[n] on, lies
    between the state in its slot and the tokens of this call, whose records go behind it.

    Args (the others as in `extend`):
        state_pool: [S, H, V, K]; only fold_slots are written.
        bank_rows: [N] int64, the row of each request's records in the banks (its running-request row).
        bank_u: [B, R, H, V] fp32: the u of each token (see the module's formula).
        bank_k: [B, R, H, K] in the activation dtype, k before its normalisation.
        bank_g: [B, R, H, K] fp32 log decay. Tail and tokens of a request are at most R together.
        starts: [N] int64, 0..R-1. tails: [N] int64.
        fold_slots: [N] int64: where the state behind the tail is written, -1: nowhere.

    Returns:
        o [T, H, V] in v's dtype. A request without a slot leaves no records.
    """
    compute = torch.promote_types(v.dtype, torch.float32)
    o = torch.zeros_like(v)
    decay = g.to(compute).exp()
    query, key = _normalise(q.to(compute)) * scale, _normalise(k.to(compute))
    ring = bank_u.shape[1]
    for n, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        stored = state_pool[slot]
        row, begin, at = int(bank_rows[n]), int(cu_seqlens[n]), int(starts[n])
        for _ in range(int(tails[n])):
            stored = _replayed(stored, bank_u[row, at], bank_k[row, at], bank_g[row, at])
            at = (at + 1) % ring
        if fold_slots[n] >= 0:
            state_pool[fold_slots[n]] = stored
        for t in range(begin, int(cu_seqlens[n + 1])):
            state = stored.to(compute) * decay[t].unsqueeze(1)
            error = v[t].to(compute) - torch.einsum("hvk,hk->hv", state, key[t])
            u = beta[t].to(compute).unsqueeze(1) * error
            state = state + torch.einsum("hv,hk->hvk", u, key[t])
            o[t] = torch.einsum("hvk,hk->hv", state, query[t]).to(o.dtype)
            stored = state.to(state_pool.dtype)
            bank_u[row, at], bank_k[row, at], bank_g[row, at] = u, k[t], g[t]
            at = (at + 1) % ring
    return o


@register("kda.commit", "reference", preference=0, device="any")
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
    """The first counts[n] recorded tokens enter the states of all layers: S <- S * d + u k^T each.

    Args:
        state_pools: [L, S, H, V, K]; a bf16 state is rounded after every token.
        slots: [N] int64, the states to go on from, -1 for none.
        target_slots: [N] int64, where they are written: usually slots; a state whose target is another slot
            stays as it is.
        track_slots: [N] int64, -1 for none. bank_rows: [N] int64.
        bank_u, bank_k, bank_g: the banks of `verify`, stacked over the layers: [L, B, R, ...].
        starts: [N] int64, the ring row of the first of them.
        counts: [N] int64, 0..R accepted tokens (the last one is the verified token before the bonus).
        track_offsets: [N] int64: the state after so many of these tokens is also kept in track_slots[n]
            (0: the state before them). Beyond counts[n] or below 0: nothing is kept.

    A request with nothing to commit (counts[n] = 0) writes nothing, also not to another target.
    """
    ring = bank_u.shape[2]
    for n, slot in enumerate(slots.tolist()):
        row, count, track = int(bank_rows[n]), int(counts[n]), int(track_slots[n])
        if slot < 0 or count == 0:
            continue
        stored = state_pools[:, slot].clone()
        for i in range(count + 1):
            if i == track_offsets[n] and track >= 0:
                state_pools[:, track] = stored
            if i == count:
                break
            at = (int(starts[n]) + i) % ring
            stored = _replayed(stored, bank_u[:, row, at], bank_k[:, row, at], bank_g[:, row, at])
        state_pools[:, target_slots[n]] = stored
