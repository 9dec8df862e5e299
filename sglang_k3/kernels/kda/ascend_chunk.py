"""KDA prefill on an Ascend NPU, in torch operators: 16 tokens at a time (arXiv 2510.26692, chunk form).

What tokens of a chunk mean to each other is computed for all chunks at once; the states then walk from
chunk to chunk, all requests together. The layout depends on the lengths alone, which the host knows: it is
built once a forward and shared by the layers (`plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_k3.kernels.ascend import DEVICE, present, put
from sglang_k3.kernels.kda.ascend import Block, normalise, solve_unit_lower
from sglang_k3.kernels.registry import register

CHUNK = 16
_PAIRS = 64
"""Chunks whose pairs of tokens are held at a time: [.., 16, 16, K] fp32 each."""


@dataclass(frozen=True)
class Plan:
    """order [N]: requests, longest first. tokens [C, 16]: the row of each chunk's tokens, T for none; chunks
    stand step by step. active: how many requests have a chunk in each step. place [T]: where a token's
    output stands among the chunks' rows; rows beyond the requests' point at row C * 16."""

    order: torch.Tensor
    tokens: torch.Tensor
    active: tuple[int, ...]
    place: torch.Tensor


def plan(lengths: Sequence[int], rows: int, device: torch.device) -> Plan:
    """lengths: tokens of each request, packed one after another; rows: T, padding included."""
    counts = [-(-length // CHUNK) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda n: -counts[n])
    begins = [sum(lengths[:n]) for n in range(len(lengths))]
    active = tuple(sum(count > step for count in counts) for step in range(max(counts, default=0)))
    tokens: list[list[int]] = []
    place = [len(lengths)] * 0
    where = {}
    for step, many in enumerate(active):
        for n in order[:many]:
            first = step * CHUNK
            row = [begins[n] + i if i < lengths[n] else rows for i in range(first, first + CHUNK)]
            for i, token in enumerate(row):
                if token < rows:
                    where[token] = len(tokens) * CHUNK + i
            tokens.append(row)
    place = [where.get(token, len(tokens) * CHUNK) for token in range(rows)]

    def there(values: list, *shape: int) -> torch.Tensor:
        made = torch.tensor(values, dtype=torch.int64).view(*shape)
        return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)

    return Plan(there(order, -1), there(tokens, -1, CHUNK), active, there(place, -1))


@register("kda.extend", "npu torch, chunks of 16", preference=10, device=DEVICE)
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
    layout: Plan | None = None,
) -> torch.Tensor:
    """See `reference.extend`. layout: `plan` of these lengths; without it the host waits for cu_seqlens.

    States and checkpoints are computed in fp32 whatever the activations' dtype.
    """
    if layout is None:
        layout = plan(cu_seqlens.diff().tolist(), v.shape[0], v.device)
    chunks = len(layout.tokens)
    if chunks == 0:
        return torch.zeros_like(v)

    def cut(rows: torch.Tensor) -> torch.Tensor:
        """[T, H, ...] -> [C, H, 16, ...] fp32, zero for no token."""
        padded = torch.cat([rows.float(), rows.new_zeros(1, *rows.shape[1:], dtype=torch.float32)])
        return padded[layout.tokens].transpose(1, 2)

    real = cut(torch.ones_like(beta).unsqueeze(-1))
    block = Block(normalise(cut(q)) * scale * real, normalise(cut(k)) * real, cut(g).cumsum(-2))
    step, values = cut(beta.unsqueeze(-1)), cut(v)
    reach = block.reach()
    parts = []
    for first in range(0, chunks, _PAIRS):
        some = Block(*(field[first : first + _PAIRS] for field in block))
        beta_of = step[first : first + _PAIRS]
        lower = beta_of * some.meetings(some.k, own=False)
        right = torch.cat([values[first : first + _PAIRS], some.k * reach[first : first + _PAIRS]], dim=-1)
        parts.append((solve_unit_lower(lower, beta_of * right), some.meetings(some.q, own=True)))
    solved, attends = (torch.cat(part) for part in zip(*parts, strict=True))
    news, olds = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    sorted_slots = slots[layout.order]
    state = state_pool[present(sorted_slots)[1]].float()
    state = state.masked_fill(fresh[layout.order].view(-1, 1, 1, 1), 0.0)
    offsets = track_offsets[layout.order]
    kept = torch.where((offsets >= 0).view(-1, 1, 1, 1), state, 0.0)
    outs, first = [], 0
    for index, many in enumerate(layout.active):
        part = slice(first, first + many)
        first += many
        now, G, key = state[:many], block.G[part], block.k[part]
        u = news[part] - olds[part] @ now.transpose(-1, -2)
        outs.append((block.q[part] * reach[part]) @ now.transpose(-1, -2) + attends[part] @ u)
        inside = offsets[:many] - index * CHUNK
        hit = (inside > 0) & (inside <= CHUNK)
        kept[:many] = torch.where(hit.view(-1, 1, 1, 1), _after(now, G, key, u, inside), kept[:many])
        whole = torch.full_like(inside, CHUNK)
        state = torch.cat([_after(now, G, key, u, whole), state[many:]])
    there = sorted_slots >= 0
    put(
        state_pool,
        torch.where(there & (offsets >= 0), track_slots[layout.order], -1),
        kept.to(state_pool.dtype),
    )
    put(state_pool, sorted_slots, state.to(state_pool.dtype))

    silent = torch.empty_like(there).index_copy_(0, layout.order, there)
    flat = torch.cat(outs).transpose(1, 2).flatten(0, 1)
    flat = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])[layout.place]
    row = torch.arange(v.shape[0], device=v.device)
    request = torch.searchsorted(cu_seqlens[1:], row, right=True).clamp(max=len(slots) - 1)
    return flat.masked_fill(~silent[request].view(-1, 1, 1), 0.0).to(v.dtype)


def _after(
    state: torch.Tensor, G: torch.Tensor, key: torch.Tensor, u: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """state [M, H, V, K] behind the first rows [M] (1..16) of a chunk."""
    last = rows.clamp(1, CHUNK) - 1
    place = torch.arange(CHUNK, device=rows.device)
    lives = (place <= last.unsqueeze(1)).view(-1, 1, CHUNK, 1)
    at = G[torch.arange(len(rows), device=rows.device), :, last].unsqueeze(2)
    left = key * torch.where(lives, at - G, float("-inf")).exp()
    return state * at.exp() + u.transpose(-1, -2) @ left
