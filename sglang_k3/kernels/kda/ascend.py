"""kda on an Ascend NPU, in torch operators: decode, verify with records, commit. Prefill: ascend_chunk.py.

A block of rows behind a state is one product with the state and a small triangular system among the rows
(the chunk form of arXiv 2510.26692). Only differences of cumulative log decays are exponentiated, and they
are never positive, so no gate overflows. Nothing asks the host for a value, and no tensor holds a state
for each drafted row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from sglang_k3.kernels.ascend import DEVICE, present, put, request_of_row
from sglang_k3.kernels.kda import reference
from sglang_k3.kernels.registry import register

_COMMIT_BYTES = 128 << 20
"""Of states that a commit holds at a time beside the pool; layers are taken in groups of that size."""

register("kda.gate", "npu torch", preference=10, device=DEVICE)(reference.gate)


def normalise(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] to unit length, fp32."""
    wide = x.float()
    return wide * (wide.square().sum(-1, keepdim=True) + reference.NORM_EPS).rsqrt()


class Block(NamedTuple):
    """Rows behind one state, for a batch [...] of states: q, k, decay so far G [..., R, K], fp32.

    q and k are normalised and q scaled; rows that do not count have k = 0 and a log decay of 0.
    """

    q: torch.Tensor
    k: torch.Tensor
    G: torch.Tensor

    def reach(self) -> torch.Tensor:
        """[..., R, K]: what is left of the state at each row."""
        return self.G.exp()

    def meetings(self, rows: torch.Tensor, *, own: bool) -> torch.Tensor:
        """[..., R, R]: row i of `rows` against key j, decayed from j to i; own: with its own key (j = i)."""
        gaps = self.G.unsqueeze(-2) - self.G.unsqueeze(-3)
        size = self.G.shape[-2]
        earlier = torch.ones(size, size, dtype=torch.bool, device=rows.device).tril(0 if own else -1)
        # Above the diagonal a gap is positive and may overflow; those pairs never meet.
        decays = gaps.masked_fill(~earlier.unsqueeze(-1), float("-inf")).exp()
        return (rows.unsqueeze(-2) * self.k.unsqueeze(-3) * decays).sum(-1)


_STEP = 4


def solve_unit_lower(lower: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(I + lower)^-1 right for strictly lower [..., R, R] and right [..., R, C].

    Substitution, four rows at a time: a whole inverse by squaring would cancel badly where keys repeat.
    """
    solved: list[torch.Tensor] = []
    for row in range(0, right.shape[-2], _STEP):
        part = right[..., row : row + _STEP, :]
        if solved:
            part = part - lower[..., row : row + _STEP, :row] @ torch.cat(solved, dim=-2)
        diagonal = -lower[..., row : row + _STEP, row : row + _STEP]
        part = part + diagonal @ part
        solved.append(part + diagonal @ (diagonal @ part))
    return torch.cat(solved, dim=-2)


@register("kda.decode", "npu torch", preference=10, device=DEVICE)
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
    """See `reference.decode`."""
    kept, places = present(slots)
    before = state_pool[places]
    query, key = normalise(q) * scale, normalise(k)
    state = before.float() * g.exp().unsqueeze(2)
    u = beta.unsqueeze(-1) * (v.float() - (state @ key.unsqueeze(-1)).squeeze(-1))
    state = state + u.unsqueeze(-1) * key.unsqueeze(2)
    o = (state @ query.unsqueeze(-1)).squeeze(-1)
    mask = kept.view(-1, 1, 1, 1)
    state_pool[places] = torch.where(mask, state.to(state_pool.dtype), before)
    return o.masked_fill(~mask.squeeze(-1), 0.0).to(v.dtype)


@register("kda.verify", "npu torch", preference=10, device=DEVICE)
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
    """See `reference.verify`. width: the most rows of a request (the ring's if left out), known to the host;
    inside, each request's rows take that many places.

    Records of padding and of requests without a slot go to bank row 0, which is padding's.
    """
    ring = bank_u.shape[1]
    width = ring if width is None else width
    requests, tail_room = len(slots), ring - width
    request, place, padding = request_of_row(cu_seqlens, v.shape[0])
    nobody = padding | (slots[request] < 0)

    def spread(rows: torch.Tensor) -> torch.Tensor:
        """[T, H, C] -> [N, H, width, C] fp32, zero where a request has no row."""
        places = rows.new_zeros(requests + 1, width, *rows.shape[1:], dtype=torch.float32)
        # What belongs to nobody lands behind the last request.
        places[torch.where(nobody, requests, request), torch.where(nobody, 0, place)] = rows.float()
        return places[:requests].transpose(1, 2)

    raw_k, log_decay = spread(k), spread(g)
    counted = spread(torch.ones_like(beta).unsqueeze(-1))
    query, key, values = spread(q), normalise(raw_k) * counted, spread(v)
    query = normalise(query) * scale
    step = spread(beta.unsqueeze(-1))

    _, places = present(slots)
    state = state_pool[places].float()
    tail_u = None
    if tail_room:
        index = torch.arange(tail_room, device=slots.device)
        at = (starts.unsqueeze(1) + index) % ring
        lives = (index < tails.unsqueeze(1)).view(requests, tail_room, 1, 1)

        def of_tail(bank: torch.Tensor) -> torch.Tensor:
            rows = torch.where(lives, bank[bank_rows.unsqueeze(1), at].float(), 0.0)
            return rows.transpose(1, 2)

        # NaN may stand where no record lies, so the key is cut after its norm too.
        tail_k = normalise(of_tail(bank_k)) * lives.transpose(1, 2)
        tail_u = of_tail(bank_u)
        behind = Block(tail_k, tail_k, of_tail(bank_g).cumsum(-2))
        state = _enter(state, behind, tail_u)
        put(state_pool, fold_slots, state.to(state_pool.dtype))

    block = Block(query, key, log_decay.cumsum(-2))
    reach = block.reach()
    seen = (key * reach) @ state.transpose(-1, -2)
    u = solve_unit_lower(step * block.meetings(key, own=False), step * (values - seen))
    out = (query * reach) @ state.transpose(-1, -2) + block.meetings(query, own=True) @ u

    flat = request, place.clamp(max=width - 1)
    row = torch.where(nobody, 0, bank_rows[request])
    to = torch.where(nobody, 0, (starts[request] + tails[request] + place) % ring)
    bank_u[row, to] = u.transpose(1, 2)[flat]
    bank_k[row, to] = k.to(bank_k.dtype)
    bank_g[row, to] = g.to(bank_g.dtype)
    return out.transpose(1, 2)[flat].masked_fill(nobody.view(-1, 1, 1), 0.0).to(v.dtype)


def _enter(state: torch.Tensor, block: Block, u: torch.Tensor) -> torch.Tensor:
    """state [..., V, K] behind all rows of the block, u [..., R, V]."""
    last = block.G[..., -1:, :]
    left = block.k * (last - block.G).exp()
    return state * last.exp() + u.transpose(-1, -2) @ left


class Entering(NamedTuple):
    """Which recorded rows a commit enters into which states.

    places [N]: the slots of the states before them, which may be indexed with. at [N, ring]: each request's
    rows of its bank, oldest first. writes: slots [N] to write, -1 for none, and how many rows [N] enter each.
    """

    places: torch.Tensor
    at: torch.Tensor
    writes: list[tuple[torch.Tensor, torch.Tensor]]

    @staticmethod
    def of(
        slots: torch.Tensor,
        target_slots: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
        tracked: tuple[torch.Tensor, torch.Tensor] | None,
        ring: int,
    ) -> Entering:
        """As `reference.commit` is told; tracked: track_offsets and track_slots, None where no checkpoint can
        lie in these runs."""
        some = (slots >= 0) & (counts > 0)
        writes = [(torch.where(some, target_slots, -1), counts)]
        if tracked is not None:
            offsets, track_slots = tracked
            inside = some & (offsets >= 0) & (offsets <= counts)
            writes.append((torch.where(inside, track_slots, -1), offsets))
        _, places = present(slots)
        at = (starts.unsqueeze(1) + torch.arange(ring, device=slots.device)) % ring
        return Entering(places, at, writes)


@register("kda.commit", "npu torch", preference=10, device=DEVICE)
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
    """See `reference.commit`. tracking False: the host knows that no checkpoint lies in these runs, and a
    request's slot is all that is written."""
    tracked = (track_offsets, track_slots) if tracking else None
    entering = Entering.of(slots, target_slots, starts, counts, tracked, bank_u.shape[2])
    for part in layer_groups(state_pools, len(slots)):
        pools = state_pools[part]
        banks = (bank[part][:, bank_rows.unsqueeze(1), entering.at] for bank in (bank_u, bank_k, bank_g))
        u, k, g = (rows.float().transpose(2, 3) for rows in banks)
        before = pools[:, entering.places].float()
        # The state before the run is read above, so the order does not matter.
        for targets, numbers in entering.writes:
            wanted, to = present(targets)
            mask = wanted.view(1, -1, 1, 1, 1)
            pools[:, to] = torch.where(mask, _after(before, u, k, g, numbers).to(pools.dtype), pools[:, to])


def layer_groups(state_pools: torch.Tensor, requests: int) -> Iterator[slice]:
    """Layers of state_pools [L, S, H, V, K] whose states of so many requests are held at a time."""
    each = max(1, state_pools[0, 0].numel() * 4 * max(requests, 1))
    group = max(1, _COMMIT_BYTES // each)
    for first in range(0, state_pools.shape[0], group):
        yield slice(first, first + group)


def _after(
    before: torch.Tensor, u: torch.Tensor, k: torch.Tensor, g: torch.Tensor, number: torch.Tensor
) -> torch.Tensor:
    """States [L, N, H, V, K] behind the first number [N] of recorded rows u, k, g [L, N, H, R, ...]."""
    lives = (torch.arange(u.shape[-2], device=u.device) < number.unsqueeze(1)).view(1, len(number), 1, -1, 1)
    zero = torch.zeros((), device=u.device)
    key = normalise(torch.where(lives, k, zero)) * lives
    decays = torch.where(lives, g, zero).cumsum(-2)
    return _enter(before, Block(key, key, decays), torch.where(lives, u, zero))
