"""Speculation: verify with replay records, their commit, and a draft model's attention."""

from __future__ import annotations

import torch

from benchmarks import counts
from benchmarks.cases.case import DTYPES, ELEMENT, Case, Draw, Sizes
from benchmarks.cases.kda import rows
from benchmarks.rotation import Arguments

ROWS = 8
"""Drafted rows a request: the anchor and gamma = 7 drafts."""

ACCEPTED = 4
DRAFT_HEADS, DRAFT_GROUPS, DRAFT_WIDTH = 64, 16, 64
"""Kimi-K3-DSpark's grouped queries."""


def cases(sizes: Sizes) -> list[Case]:
    s = sizes
    return [
        _verify(s),
        _commit(s),
        *(_conv_verify(s, dtype) for dtype in ("fp32", "bf16")),
        *(_conv_commit(s, dtype) for dtype in ("fp32", "bf16")),
        _block_attention(s),
    ]


def _bank(s: Sizes, layers: bool) -> tuple[torch.Tensor, ...]:
    """u, k and g of every request."""
    shape = (1,) * layers + (s.requests, ROWS, s.heads, s.head_dim)
    draw = Draw()
    u, k = draw.normal(*shape, scale=0.1), draw.normal(*shape)
    return u, k, s.gate_bound * draw.normal(*shape).sigmoid_()


def _no_tail(requests: int) -> tuple[torch.Tensor, ...]:
    """starts, tails and fold_slots of requests without pending records."""
    none = torch.zeros(requests, dtype=torch.int64)
    return none, none, none - 1


def _verify(s: Sizes) -> Case:
    n, h, d = s.requests, s.heads, s.head_dim

    def make() -> Arguments:
        draw = Draw()
        inputs = rows(draw, s, n * ROWS, h, "fp32")
        states = draw.normal(n, h, d, d)
        spans = draw.order(n), torch.arange(n + 1) * ROWS, torch.arange(n)
        return (*inputs, states, *spans, *_bank(s, layers=False), *_no_tail(n), d**-0.5)

    return Case(
        name="kda_verify",
        operator="kda.verify",
        dtype="fp32",
        shape={"requests": n, "rows": ROWS, "heads": h, "K": d, "V": d},
        traffic="read",
        bytes_moved=counts.kda_verify_bytes(n, ROWS, h, d, d, 4),
        flops=counts.kda_verify_flops(n, ROWS, h, d, d),
        make=make,
        cold=(5,),
    )


def _commit(s: Sizes) -> Case:
    n, h, d = s.requests, s.heads, s.head_dim

    def make() -> Arguments:
        draw = Draw()
        states = draw.normal(1, n, h, d, d)
        none = torch.full((n,), -1)
        counted = torch.full((n,), ACCEPTED)
        bank = _bank(s, layers=True)
        slots = draw.order(n)
        return (states, slots, slots, torch.arange(n), *bank, torch.zeros_like(none), counted, none, none)

    return Case(
        name="kda_commit",
        operator="kda.commit",
        dtype="fp32",
        shape={"requests": n, "tokens": ACCEPTED, "heads": h, "K": d, "V": d},
        traffic="stream",
        bytes_moved=counts.kda_commit_bytes(n, ACCEPTED, h, d, d, 4),
        flops=counts.kda_commit_flops(n, ACCEPTED, h, d, d),
        make=make,
        cold=(0,),
        note="one layer",
    )


def _conv_verify(s: Sizes, dtype: str) -> Case:
    channels, width, n = 3 * s.heads * s.head_dim, s.conv_width, s.requests

    def make() -> Arguments:
        draw = Draw()
        x = draw.normal(n * ROWS, channels, dtype=dtype)
        window = draw.normal(n, width - 1, channels, dtype=dtype)
        spans = draw.order(n), torch.arange(n + 1) * ROWS, torch.arange(n)
        bank = torch.zeros(n, ROWS, channels, dtype=DTYPES[dtype])
        return (x, draw.normal(channels, width), window, *spans, bank)

    return Case(
        name=f"short_conv_verify_{dtype}",
        operator="short_conv.verify",
        dtype=dtype,
        shape={"requests": n, "rows": ROWS, "channels": channels, "width": width},
        traffic="copy",
        bytes_moved=counts.conv_verify_bytes(n, ROWS, channels, width, ELEMENT[dtype]),
        flops=counts.conv_flops(n * ROWS, channels, width),
        make=make,
        cold=(0, 2, 6),
    )


def _conv_commit(s: Sizes, dtype: str) -> Case:
    channels, width, n = 3 * s.heads * s.head_dim, s.conv_width, s.requests

    def make() -> Arguments:
        draw = Draw()
        windows = draw.normal(1, n, width - 1, channels, dtype=dtype)
        bank = draw.normal(1, n, ROWS, channels, dtype=dtype)
        none = torch.full((n,), -1)
        counted = torch.full((n,), ACCEPTED)
        return (windows, draw.order(n), torch.arange(n), bank, counted, windows, none, none)

    return Case(
        name=f"short_conv_commit_{dtype}",
        operator="short_conv.commit",
        dtype=dtype,
        shape={"requests": n, "tokens": ACCEPTED, "channels": channels, "width": width},
        traffic="copy",
        bytes_moved=counts.conv_commit_bytes(n, channels, width, ELEMENT[dtype]),
        flops=0,
        make=make,
        cold=(0, 3),
        note="one layer",
    )


def _block_attention(s: Sizes) -> Case:
    n, drafts = s.requests, ROWS - 1
    heads, groups, wide = DRAFT_HEADS, DRAFT_GROUPS, DRAFT_WIDTH

    def make() -> Arguments:
        draw = Draw()
        slots = n * s.context
        own = [draw.normal(n, drafts, count, wide) for count in (heads, groups, groups)]
        caches = [draw.normal(slots, groups, wide) for _ in range(2)]
        table = draw.order(slots).view(n, s.context).int()
        return (*own, *caches, table, torch.arange(n), torch.full((n,), s.context), wide**-0.5, False)

    return Case(
        name="block_attention",
        operator="block_attention",
        dtype="fp32",
        shape={
            "requests": n,
            "rows": drafts,
            "context": s.context,
            "heads": heads,
            "groups": groups,
            "D": wide,
        },
        traffic="read",
        bytes_moved=counts.block_attention_bytes(n, s.context, drafts, heads, groups, wide, 4),
        flops=counts.block_attention_flops(n, s.context, drafts, heads, wide),
        make=make,
        cold=(3, 4),
        note="slots in random order",
    )
