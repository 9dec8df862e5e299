"""Operators that work a row at a time: norms, activations, gates and the attention residual."""

from __future__ import annotations

from benchmarks import counts
from benchmarks.cases.case import ELEMENT, Case, Draw, Sizes
from benchmarks.rotation import Arguments


def cases(sizes: Sizes) -> list[Case]:
    s = sizes
    variants = [
        (phase, tokens, dtype)
        for phase, tokens in (("decode", s.requests), ("extend", s.rows))
        for dtype in ("fp32", "bf16")
    ]
    return [
        *(_rms_norm(s, *variant) for variant in variants),
        *(_activation(s, *variant) for variant in variants),
        *(_output_gate(s, *variant) for variant in variants),
        *(_mix(s, *variant) for variant in variants),
        _block_prepare(s),
        _merge_partial(s),
    ]


def _rms_norm(s: Sizes, phase: str, tokens: int, dtype: str) -> Case:
    def make() -> Arguments:
        draw = Draw()
        x = draw.normal(tokens, s.hidden, dtype=dtype)
        return (x, draw.normal(s.hidden, dtype=dtype), s.eps)

    return Case(
        name=f"rms_norm_{phase}_{dtype}",
        operator="rms_norm",
        dtype=dtype,
        shape={"tokens": tokens, "width": s.hidden},
        traffic="copy",
        bytes_moved=counts.rms_norm_bytes(tokens, s.hidden, ELEMENT[dtype]),
        flops=counts.rms_norm_flops(tokens, s.hidden),
        make=make,
        cold=(0,),
    )


def _activation(s: Sizes, phase: str, tokens: int, dtype: str) -> Case:
    def make() -> Arguments:
        gate_up = Draw().normal(tokens, 2 * s.shared_inner, dtype=dtype)
        return (gate_up, s.situ_beta, s.situ_linear_beta)

    return Case(
        name=f"activation_{phase}_{dtype}",
        operator="activation.gated",
        dtype=dtype,
        shape={"tokens": tokens, "inner": s.shared_inner},
        traffic="copy",
        bytes_moved=counts.activation_bytes(tokens, s.shared_inner, ELEMENT[dtype]),
        flops=counts.activation_flops(tokens, s.shared_inner),
        make=make,
        cold=(0,),
        note="SiTU of the shared experts",
    )


def _output_gate(s: Sizes, phase: str, tokens: int, dtype: str) -> Case:
    width = s.heads * s.head_dim

    def make() -> Arguments:
        draw = Draw()
        return tuple(draw.normal(tokens, width, dtype=dtype) for _ in range(2))

    return Case(
        name=f"output_gate_{phase}_{dtype}",
        operator="output_gate",
        dtype=dtype,
        shape={"tokens": tokens, "width": width},
        traffic="copy",
        bytes_moved=counts.output_gate_bytes(tokens, width, ELEMENT[dtype]),
        flops=counts.output_gate_flops(tokens, width),
        make=make,
        cold=(0, 1),
    )


def _mix(s: Sizes, phase: str, tokens: int, dtype: str) -> Case:
    def make() -> Arguments:
        draw = Draw()
        partial = draw.normal(tokens, s.hidden, dtype=dtype)
        return (partial, draw.normal(s.bank, tokens, s.hidden, dtype=dtype), draw.normal(s.hidden), s.eps)

    return Case(
        name=f"residual_mix_{phase}_{dtype}",
        operator="attention_residual.mix",
        dtype=dtype,
        shape={"bank": s.bank, "tokens": tokens, "width": s.hidden},
        traffic="read",
        bytes_moved=counts.mix_bytes(s.bank, tokens, s.hidden, ELEMENT[dtype]),
        flops=counts.mix_flops(s.bank, tokens, s.hidden),
        make=make,
        cold=(0, 1),
    )


def _block_prepare(s: Sizes) -> Case:
    tokens, mixes = s.requests, s.readers

    def make() -> Arguments:
        draw = Draw()
        bank = draw.normal(s.bank, tokens, s.hidden)
        return (bank, draw.normal(mixes, s.hidden), s.eps)

    return Case(
        name="residual_prepare",
        operator="attention_residual.block_prepare",
        dtype="fp32",
        shape={"bank": s.bank, "tokens": tokens, "width": s.hidden, "readers": mixes},
        traffic="copy",
        bytes_moved=counts.block_prepare_bytes(s.bank, tokens, s.hidden, mixes, 4),
        flops=counts.block_prepare_flops(s.bank, tokens, s.hidden, mixes),
        make=make,
        cold=(0, 1),
    )


def _merge_partial(s: Sizes) -> Case:
    tokens = s.requests

    def make() -> Arguments:
        draw = Draw()
        partial, acc = (draw.normal(tokens, s.hidden) for _ in range(2))
        maximum, total = draw.normal(tokens), draw.normal(tokens).exp_()
        return (partial, acc, maximum, total, draw.normal(s.hidden), s.eps)

    return Case(
        name="residual_merge",
        operator="attention_residual.merge_partial",
        dtype="fp32",
        shape={"tokens": tokens, "width": s.hidden},
        traffic="copy",
        bytes_moved=counts.merge_bytes(tokens, s.hidden, 4),
        flops=counts.merge_flops(tokens, s.hidden),
        make=make,
        cold=(0, 1, 4),
    )
