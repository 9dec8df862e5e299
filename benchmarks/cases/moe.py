"""The router, one packed expert beside plain linear maps, and the experts of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks import counts
from benchmarks.cases.case import ELEMENT, Case, Draw, PeerRun, Sizes
from benchmarks.rotation import Arguments

ONE_EXPERT_ROWS = (1, 16, 64)
EXPERT_ROWS = (1, 4, 16, 64)

_PEER_ROUNDS = 5
_SCALE_BYTE = 120  # 2^-7: weights of a usual size


def cases(sizes: Sizes) -> list[Case]:
    s = sizes
    return [
        *(_route(s, phase, tokens) for phase, tokens in (("decode", s.requests), ("extend", s.rows))),
        *(_expert(s, rows) for rows in ONE_EXPERT_ROWS),
        *(_experts(s, rows, "bf16", ("fast",)) for rows in EXPERT_ROWS),
        *(_experts(s, rows, "fp32", ("exact",)) for rows in EXPERT_ROWS[::2]),
    ]


def expert_name(rows: int) -> str:
    return f"mxfp4_expert_{rows}"


def _route(s: Sizes, phase: str, tokens: int) -> Case:
    def make() -> Arguments:
        draw = Draw()
        bias = draw.normal(s.experts, scale=0.01)
        return (draw.normal(tokens, s.experts), bias, s.top_k, True, 1.0, 1, 1, "sigmoid")

    return Case(
        name=f"route_{phase}",
        operator="moe.route",
        dtype="fp32",
        shape={"tokens": tokens, "experts": s.experts, "top_k": s.top_k},
        traffic="read",
        bytes_moved=counts.route_bytes(tokens, s.experts, s.top_k),
        flops=counts.route_flops(tokens, s.experts),
        make=make,
        cold=(0,),
    )


def _packed(draw: Draw, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of MXFP4 matrices [..., R, C]."""
    *leading, columns = shape
    scale = torch.full((*leading, columns // counts.MX_BLOCK), _SCALE_BYTE, dtype=torch.uint8)
    return draw.bytes(*leading, columns // 2), scale


def _expert(s: Sizes, rows: int) -> Case:
    """All rows go to one expert, which is another one in every call."""
    inner, width = s.expert_inner, s.expert_width
    # Without bf16 instructions, torch takes up to seconds for several rows.
    rounds = None if rows == 1 else _PEER_ROUNDS

    def make() -> Arguments:
        draw = Draw()
        x = draw.normal(rows, width, dtype="bf16")
        choice = (torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, 1))
        w13 = _packed(draw, 1, 2 * inner, width)
        w2 = _packed(draw, 1, width, inner)
        return (x, *choice, *w13, *w2, s.situ_beta, s.situ_linear_beta)

    def plain(dtype: str) -> tuple[Arguments, Sequence[int]]:
        draw = Draw()
        x = draw.normal(rows, width, dtype=dtype)
        w13 = draw.normal(2 * inner, width, dtype=dtype, scale=0.02)
        return (x, w13, draw.normal(width, inner, dtype=dtype, scale=0.02)), (1, 2)

    return Case(
        name=expert_name(rows),
        operator="moe.experts_mxfp4",
        dtype="bf16",
        shape={"rows": rows, "width": width, "inner": inner},
        traffic="read",
        bytes_moved=counts.experts_bytes(1, rows, 1, width, inner, ELEMENT["bf16"]),
        flops=counts.experts_flops(rows, 1, width, inner),
        make=make,
        cold=(3, 4, 5, 6),
        modes=("fast",),
        peers=tuple(
            PeerRun(f"torch linear {dtype}", dtype, _torch_linears, partial(plain, dtype), rounds)
            for dtype in ("bf16", "fp32")
        ),
        note=f"one expert, {inner} x {width} three times; the peers' two products have no activation between",
    )


def _torch_linears(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """An expert's products alone, the half of the first standing for its activation."""
    return F.linear(F.linear(x, w13)[:, : w2.shape[1]], w2)


def _experts(s: Sizes, rows: int, dtype: str, modes: tuple[str, ...]) -> Case:
    """`rows` tokens that all chose the same top_k experts; the next call's chose the next ones."""
    groups = s.held_experts // s.top_k

    def make() -> Arguments:
        draw = Draw()
        x = draw.normal(rows, s.expert_width, dtype=dtype)
        ids = torch.arange(s.top_k).repeat(rows, 1)
        weights = torch.full((rows, s.top_k), 1 / s.top_k)
        w13 = _packed(draw, s.held_experts, 2 * s.expert_inner, s.expert_width)
        w2 = _packed(draw, s.held_experts, s.expert_width, s.expert_inner)
        return (x, ids, weights, *w13, *w2, s.situ_beta, s.situ_linear_beta)

    def group_by_group(arguments: Arguments) -> list[Arguments]:
        x, ids, *others = arguments
        return [(x, ids + group * s.top_k, *others) for group in range(groups)]

    return Case(
        name=f"experts_{rows}_{dtype}",
        operator="moe.experts_mxfp4",
        dtype=dtype,
        shape={
            "tokens": rows,
            "top_k": s.top_k,
            "experts_held": s.held_experts,
            "experts_touched": s.top_k,
            "width": s.expert_width,
            "inner": s.expert_inner,
        },
        traffic="read",
        bytes_moved=counts.experts_bytes(
            s.top_k, rows, s.top_k, s.expert_width, s.expert_inner, ELEMENT[dtype]
        ),
        flops=counts.experts_flops(rows, s.top_k, s.expert_width, s.expert_inner),
        make=make,
        cold=(3, 4, 5, 6),
        modes=modes,
        expand=group_by_group,
        note=f"{s.held_experts} of {s.experts} experts held; all tokens choose the same {s.top_k}",
    )
