"""Kimi Delta Attention: decode, prefill, gates, short convolution and gated norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from benchmarks import counts
from benchmarks.cases.case import DTYPES, ELEMENT, Case, Draw, PeerRun, Sizes
from benchmarks.rotation import Arguments

PEER_ROUNDS = 3


def cases(sizes: Sizes, full: bool) -> list[Case]:
    """`full` adds the largest prefill beside transformers' rule (minutes, and up to 20 GB)."""
    s = sizes
    return [
        *(_decode(s, dtype) for dtype in ("fp32", "bf16")),
        _prefill(s, s.prefill_tokens, ("fast", "exact"), peer=full),
        _prefill(s, s.prefill_tokens // 2, ("fast",)),
        _prefill(s, s.peer_tokens, ("fast",), peer=True),
        *(_gate(s, phase, tokens) for phase, tokens in (("decode", s.requests), ("extend", s.rows))),
        *(_conv_extend(s, dtype) for dtype in ("fp32", "bf16")),
        *(_conv_decode(s, dtype) for dtype in ("fp32", "bf16")),
        *(
            _gated_norm(s, phase, tokens, dtype)
            for phase, tokens in (("decode", s.requests), ("extend", s.rows))
            for dtype in ("fp32", "bf16")
        ),
    ]


def transformers_bytes(tokens: int, heads: int, k: int) -> int:
    """About what transformers' rule holds at its peak: four [T, H, 64, K] fp32 tensors."""
    return 4 * tokens * heads * counts.CHUNK * k * 4


def prefill_name(tokens: int) -> str:
    return f"kda_prefill_{tokens}"


def rows(draw: Draw, s: Sizes, tokens: int, heads: int, dtype: str) -> Arguments:
    """q, k, v, g, beta of some tokens; g is a bounded log decay as the gate makes it."""
    wide = (tokens, heads, s.head_dim)
    q, k, v = (draw.normal(*wide, dtype=dtype) for _ in range(3))
    return (
        q,
        k,
        v,
        s.gate_bound * draw.normal(*wide).sigmoid_(),
        draw.normal(tokens, heads).sigmoid_(),
    )


def _decode(s: Sizes, dtype: str) -> Case:
    n, h, d = s.requests, s.heads, s.head_dim

    def make() -> Arguments:
        draw = Draw()
        states = draw.normal(n, h, d, d)
        return (*rows(draw, s, n, h, dtype), states, draw.order(n), d**-0.5)

    return Case(
        name="kda_decode" if dtype == "fp32" else f"kda_decode_{dtype}",
        operator="kda.decode",
        dtype=dtype,
        shape={"requests": n, "heads": h, "K": d, "V": d},
        traffic="stream",
        bytes_moved=counts.kda_decode_bytes(n, h, d, d, ELEMENT[dtype]),
        flops=counts.kda_decode_flops(n, h, d, d),
        make=make,
        cold=(5,),
        note="states in fp32",
    )


def _prefill(s: Sizes, tokens: int, modes: tuple[str, ...], peer: bool = False) -> Case:
    h, d = s.prefill_heads, s.head_dim

    def make() -> Arguments:
        draw = Draw()
        inputs = rows(draw, s, tokens, h, "fp32")
        none = torch.full((1,), -1)
        spans = (torch.zeros(1, dtype=torch.int64), torch.tensor([0, tokens]))
        return (
            *inputs,
            torch.zeros(1, h, d, d),
            *spans,
            torch.ones(1, dtype=torch.bool),
            none,
            none,
            d**-0.5,
        )

    def peer_arguments() -> tuple[Arguments, Sequence[int]]:
        return (_transformers_rule(), *(row.unsqueeze(0) for row in make()[:5])), ()

    # Seconds a call: in the first rounds only.
    rule = PeerRun("transformers", "fp32", _follow, peer_arguments, rounds=PEER_ROUNDS)
    return Case(
        name=prefill_name(tokens),
        operator="kda.extend",
        dtype="fp32",
        shape={"tokens": tokens, "heads": h, "K": d, "V": d},
        traffic="read",
        bytes_moved=counts.kda_prefill_bytes(tokens, h, d, d, 4),
        flops=counts.kda_prefill_flops(tokens, h, d, d),
        make=make,
        cold=(0, 1, 2, 3, 4, 5),
        modes=modes,
        peers=(rule,) if peer else (),
        note=f"{h} of {s.heads} heads, one request from a zero state",
    )


def _transformers_rule() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """transformers' own torch form of the chunked rule.

    Under its decorator: where fla is installed, the decorated function would call that instead.
    """
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    return chunk_kimi_delta_attention.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]


def _follow(rule: Callable[..., tuple[torch.Tensor, torch.Tensor]], *rows: torch.Tensor) -> torch.Tensor:
    """The rule over rows [1, T, H, ...] -> o [1, T, H, V]."""
    return rule(*rows, output_final_state=True, use_qk_l2norm_in_kernel=True)[0]


def _gate(s: Sizes, phase: str, tokens: int) -> Case:
    h, d = s.heads, s.head_dim

    def make() -> Arguments:
        draw = Draw()
        vectors = (draw.normal(h), draw.normal(h * d))
        return (draw.normal(tokens, h * d), draw.normal(tokens, h), *vectors, s.gate_bound)

    return Case(
        name=f"kda_gate_{phase}",
        operator="kda.gate",
        dtype="fp32",
        shape={"tokens": tokens, "heads": h, "K": d},
        traffic="copy",
        bytes_moved=counts.kda_gate_bytes(tokens, h, d, 4),
        flops=counts.kda_gate_flops(tokens, h, d),
        make=make,
        cold=(0, 1),
    )


def _conv_extend(s: Sizes, dtype: str) -> Case:
    channels, width, tokens = 3 * s.heads * s.head_dim, s.conv_width, s.rows

    def make() -> Arguments:
        draw = Draw()
        x = draw.normal(tokens, channels, dtype=dtype)
        window = torch.zeros(1, width - 1, channels, dtype=DTYPES[dtype])
        none = torch.full((1,), -1)
        spans = (torch.zeros(1, dtype=torch.int64), torch.tensor([0, tokens]))
        fresh = torch.ones(1, dtype=torch.bool)
        return (x, draw.normal(channels, width), window, *spans, fresh, none, none)

    return Case(
        name=f"short_conv_extend_{dtype}",
        operator="short_conv.extend",
        dtype=dtype,
        shape={"tokens": tokens, "channels": channels, "width": width},
        traffic="copy",
        bytes_moved=counts.conv_extend_bytes(tokens, channels, width, ELEMENT[dtype]),
        flops=counts.conv_flops(tokens, channels, width),
        make=make,
        cold=(0, 2),
    )


def _conv_decode(s: Sizes, dtype: str) -> Case:
    channels, width, n = 3 * s.heads * s.head_dim, s.conv_width, s.requests

    def make() -> Arguments:
        draw = Draw()
        window = draw.normal(n, width - 1, channels, dtype=dtype)
        return (
            draw.normal(n, channels, dtype=dtype),
            draw.normal(channels, width),
            window,
            draw.order(n),
        )

    return Case(
        name=f"short_conv_decode_{dtype}",
        operator="short_conv.decode",
        dtype=dtype,
        shape={"requests": n, "channels": channels, "width": width},
        traffic="stream",
        bytes_moved=counts.conv_decode_bytes(n, channels, width, ELEMENT[dtype]),
        flops=counts.conv_flops(n, channels, width),
        make=make,
        cold=(0, 1, 2),
    )


def _gated_norm(s: Sizes, phase: str, tokens: int, dtype: str) -> Case:
    h, d = s.heads, s.head_dim

    def make() -> Arguments:
        draw = Draw()
        o = draw.normal(tokens, h, d, dtype=dtype)
        return (o, draw.normal(tokens, h * d, dtype=dtype), draw.normal(d), s.eps)

    return Case(
        name=f"gated_rms_norm_{phase}_{dtype}",
        operator="gated_rms_norm",
        dtype=dtype,
        shape={"tokens": tokens, "heads": h, "V": d},
        traffic="copy",
        bytes_moved=counts.gated_norm_bytes(tokens, h, d, ELEMENT[dtype]),
        flops=counts.gated_norm_flops(tokens, h, d),
        make=make,
        cold=(0, 1),
    )
