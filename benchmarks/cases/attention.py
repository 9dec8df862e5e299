"""Latent attention over the paged cache, and the linear maps around it."""

from __future__ import annotations

import torch

from benchmarks import counts
from benchmarks.cases.case import ELEMENT, Case, Draw, Sizes
from benchmarks.rotation import Arguments

PAGE = 64


def cases(sizes: Sizes) -> list[Case]:
    s = sizes
    return [
        *(_paged(s, "decode", s.requests, s.context - 1, 1, dtype) for dtype in ("fp32", "bf16")),
        *(_paged(s, "extend", 1, s.extend_prefix, s.extend_rows, dtype) for dtype in ("fp32", "bf16")),
        *(_absorb(s, dtype) for dtype in ("fp32", "bf16")),
        _linear("router", s.requests, s.hidden, s.experts, "fp32"),
        _linear("q_a", s.requests, s.hidden, s.q_lora, "fp32"),
        _linear("q_b", s.requests, s.q_lora, s.heads * (s.nope + s.rope), "fp32"),
        *(
            _linear("o_proj", rows, s.heads * s.head_dim, s.hidden, dtype)
            for dtype in ("fp32", "bf16")
            for rows in (s.requests, s.linear_rows)
        ),
    ]


def _paged(s: Sizes, phase: str, requests: int, prefix: int, new: int, dtype: str) -> Case:
    length, width = prefix + new, s.latent + s.rope

    def make() -> Arguments:
        draw = Draw()
        pages = -(-length // PAGE)
        order = draw.order(requests * pages) * PAGE  # pages anywhere, rows of a page side by side
        table = (order.view(requests, pages, 1) + torch.arange(PAGE)).flatten(1).int()
        return (
            draw.normal(requests * new, s.heads, width, dtype=dtype),
            draw.normal(requests * pages * PAGE, width, dtype=dtype),
            table,
            torch.arange(requests),
            torch.arange(requests + 1) * new,
            torch.full((requests,), prefix),
            (s.nope + s.rope) ** -0.5,
            s.latent,
        )

    return Case(
        name=f"mla_{phase}_{dtype}",
        operator="mla.paged_attention",
        dtype=dtype,
        shape={
            "requests": requests,
            "prefix": prefix,
            "new": new,
            "heads": s.heads,
            "latent": s.latent,
            "rope": s.rope,
        },
        traffic="read",
        bytes_moved=counts.mla_bytes(requests, prefix, new, s.heads, s.latent, s.rope, ELEMENT[dtype]),
        flops=counts.mla_flops(requests, prefix, new, s.heads, s.latent, s.rope),
        make=make,
        cold=(0, 1),
        note=f"pages of {PAGE} in random order"
        + ("; short, for the exact form" if phase == "extend" else ""),
    )


def _absorb(s: Sizes, dtype: str) -> Case:
    def make() -> Arguments:
        draw = Draw()
        x = draw.normal(s.requests, s.heads, s.nope, dtype=dtype)
        return (x, draw.normal(s.heads, s.latent, s.nope, dtype=dtype, scale=0.05))

    return Case(
        name=f"linear_absorb_{dtype}",
        operator="linear_batched",
        dtype=dtype,
        shape={"rows": s.requests, "heads": s.heads, "in": s.nope, "out": s.latent},
        traffic="read",
        bytes_moved=counts.linear_bytes(s.requests, s.nope, s.latent, ELEMENT[dtype], heads=s.heads),
        flops=counts.linear_flops(s.requests, s.nope, s.latent, heads=s.heads),
        make=make,
        cold=(0, 1),
        note="queries into the latent space",
    )


def _linear(what: str, rows: int, inputs: int, outputs: int, dtype: str) -> Case:
    def make() -> Arguments:
        draw = Draw()
        x = draw.normal(rows, inputs, dtype=dtype)
        return (x, draw.normal(outputs, inputs, dtype=dtype, scale=0.02))

    return Case(
        name=f"linear_{what}_{rows}_{dtype}",
        operator="linear",
        dtype=dtype,
        shape={"rows": rows, "in": inputs, "out": outputs},
        traffic="read",
        bytes_moved=counts.linear_bytes(rows, inputs, outputs, ELEMENT[dtype]),
        flops=counts.linear_flops(rows, inputs, outputs),
        make=make,
        cold=(0, 1),
    )
