"""Launches at Kimi K3's sizes, with the bytes that the work cannot do without.

A workload runs one operator; its minimum counts each input that is used and each output once. Requests are
few, because the interpreter is slow, and as many as a shape needs to be itself; on a device they are more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from sglang_k3.kernels.acceptance import ascend_triton as acceptance
from sglang_k3.kernels.activation import ascend_triton as activation
from sglang_k3.kernels.attention_residual import ascend_triton as residual
from sglang_k3.kernels.gated_rms_norm import ascend_triton as norm
from sglang_k3.kernels.kda import ascend_triton as kda
from sglang_k3.kernels.kda import ascend_triton_block as kda_block
from sglang_k3.kernels.kda import ascend_triton_chunk as kda_chunk
from sglang_k3.kernels.mla import ascend_triton as mla
from sglang_k3.kernels.short_conv import ascend_triton as conv

K = V = 128
HIDDEN = 7168
WIDTH = 8
ANCHOR = 64
"""Tokens between states of the anchored form; the tail before a verify is at most one less."""
PROMPT = 512
HEADS = {"TP16": 6, "TP8": 12}
READERS = 24
"""Of a bank, in a block of twelve layers."""
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Workload:
    """name, ranks ("" where they make no difference), what to run, and the bytes it needs at least. held: to
    close to that minimum. Not held, and reported: scratch between launches, what each tile loads again."""

    name: str
    ranks: str
    run: Callable[[], object]
    minimum: int
    held: bool = True


def _count(*tensors: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), device="cpu")
    return made.to(dtype).to(torch.get_default_device())


def _kda(ranks: str, requests: int) -> Iterator[Workload]:
    heads = HEADS[ranks]
    slots, rows = torch.arange(requests) + 1, torch.arange(requests)
    none = torch.full_like(slots, -1)
    pool = _random(requests + 1, heads, V, K, dtype=torch.float32)
    state = _count(pool[:requests])

    def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
        q, k, v = (_random(tokens, heads, K) for _ in range(3))
        g = -_random(tokens, heads, K, dtype=torch.float32).abs()
        return q, k, v, g, _random(tokens, heads, dtype=torch.float32).sigmoid()

    one, many = inputs(requests), inputs(requests * WIDTH)
    bank = (
        torch.zeros(requests, WIDTH, heads, V),
        torch.zeros(requests, WIDTH, heads, K, dtype=BF16),
        torch.zeros(requests, WIDTH, heads, K),
    )
    bounds, nothing = torch.arange(requests + 1) * WIDTH, torch.zeros_like(slots)
    tail = nothing, nothing, none
    accepted = torch.full_like(slots, 4)
    yield Workload(
        "kda.decode",
        ranks,
        lambda: kda.decode(*one, pool, slots, K**-0.5),
        2 * state + _count(*one, one[2], slots),
    )
    yield Workload(
        "kda.verify",
        ranks,
        lambda: kda.verify(*many, pool, slots, bounds, rows, *bank, *tail, K**-0.5, WIDTH),
        state + _count(*many, many[2], *bank, slots),
    )
    yield Workload(
        "kda.verify, products",
        ranks,
        lambda: kda_block.verify(*many, pool, slots, bounds, rows, *bank, *tail, K**-0.5, WIDTH),
        state + _count(*many, many[2], *bank, slots),
    )
    anchored = (
        torch.zeros(requests, ANCHOR + WIDTH, heads, V),
        torch.zeros(requests, ANCHOR + WIDTH, heads, K, dtype=BF16),
        torch.zeros(requests, ANCHOR + WIDTH, heads, K),
    )
    behind = nothing, torch.full_like(slots, ANCHOR - 1), none
    yield Workload(
        f"kda.verify, products, a tail of {ANCHOR - 1}",
        ranks,
        lambda: kda_block.verify(*many, pool, slots, bounds, rows, *anchored, *behind, K**-0.5, WIDTH),
        state + _count(*many, many[2], *(x[:, : ANCHOR - 1 + WIDTH] for x in anchored), slots),
        held=False,
    )
    prompt = inputs(PROMPT)
    ends, fresh = torch.tensor([0, PROMPT]), slots[:1] < 0
    yield Workload(
        "kda.extend",
        ranks,
        lambda: kda_chunk.extend(*prompt, pool, slots[:1], ends, fresh, none[:1], none[:1], K**-0.5),
        _count(*prompt, prompt[2]) + 2 * _count(pool[0]),
        held=False,
    )
    yield Workload(
        "kda.commit",
        ranks,
        lambda: kda.commit(
            pool[None], slots, slots, rows, *(x[None] for x in bank), nothing, accepted, none, none, False
        ),
        2 * state + _count(*bank) // 2 + _count(slots) * 5,
    )


def _conv(ranks: str, requests: int) -> Iterator[Workload]:
    channels = 3 * HEADS[ranks] * K
    weight = _random(channels, 4, dtype=torch.float32)
    slots, rows = torch.arange(requests) + 1, torch.arange(requests)
    none = torch.full_like(slots, -1)
    pool, bank = _random(requests + 1, 3, channels), _random(requests, WIDTH, channels)
    one, many, prompt = (_random(tokens, channels) for tokens in (requests, requests * WIDTH, 256))
    bounds = torch.arange(requests + 1) * WIDTH
    window, accepted = _count(pool[:requests]), torch.full_like(slots, 4)
    yield Workload(
        "short_conv.decode",
        ranks,
        lambda: conv.decode(one, weight, pool, slots),
        _count(weight, one, one, slots) + 2 * window,
    )
    yield Workload(
        "short_conv.verify",
        ranks,
        lambda: conv.verify(many, weight, pool, slots, bounds, rows, bank),
        _count(weight, many, many, bank, slots) + window,
    )
    yield Workload(
        "short_conv.commit",
        ranks,
        lambda: conv.commit(pool[None], slots, rows, bank[None], accepted, pool[None], none, none, False),
        # Three rows are read, be it of the window or of the run.
        2 * window + _count(slots, slots, slots),
    )
    yield Workload(
        "short_conv.extend",
        ranks,
        lambda: conv.extend(
            prompt, weight, pool, slots[:1], torch.tensor([0, 256]), slots[:1] < 0, none[:1], none[:1]
        ),
        _count(weight, prompt, prompt) + 2 * _count(pool[0]),
    )


def _rows(tokens: int) -> Iterator[Workload]:
    for ranks, heads in HEADS.items():
        o, gate, weight = (
            _random(tokens, heads, V),
            _random(tokens, heads * V),
            _random(V, dtype=torch.float32),
        )
        yield Workload(
            "gated_rms_norm",
            ranks,
            lambda o=o, gate=gate, weight=weight: norm.gated_rms_norm(o, gate, weight, 1e-5),
            _count(o, gate, gate, weight),
        )
    drafts = torch.zeros(tokens, WIDTH, dtype=torch.int64)
    yield Workload(
        "acceptance.chain",
        "",
        lambda: acceptance.chain(drafts, drafts),
        2 * _count(drafts[:, 1:]) + _count(drafts[:, 0]),
    )
    gate_up = _random(tokens, 2 * 3072)
    yield Workload(
        "activation.gated", "", lambda: activation.gated(gate_up, 4.0, 25.0), _count(gate_up) * 3 // 2
    )
    codes = gate_up.numel() // 2
    yield Workload(
        "activation.gated_mxfp8",
        "",
        lambda: activation.gated_mxfp8(gate_up, 4.0, 25.0),
        _count(gate_up) + codes + codes // 32,
    )
    yield Workload(
        "activation.gated_int8",
        "",
        lambda: activation.gated_int8(gate_up, 4.0, 25.0),
        _count(gate_up) + codes + 4 * tokens,
    )


def _residual(mixed: int, merged: int) -> Iterator[Workload]:
    key, gain = _random(HIDDEN, dtype=torch.float32), _random(HIDDEN)
    running, bank = _random(mixed, HIDDEN), _random(8, mixed, HIDDEN)
    partial, acc = _random(merged, HIDDEN), _random(merged, HIDDEN, dtype=torch.float32)
    top = _random(merged, dtype=torch.float32)
    yield Workload(
        "attention_residual.mix",
        "",
        lambda: residual.mix(running, bank, key, 1e-5),
        _count(running, running, bank, key),
    )
    yield Workload(
        "attention_residual.merge_partial",
        "",
        lambda: residual.merge_partial(partial, acc, top, top.abs() + 1, key, 1e-5),
        _count(partial, partial, acc, top, top, key),
    )
    yield Workload(
        "attention_residual.mix_norm",
        "",
        lambda: residual.mix_norm(running, bank, key, 1e-5, gain, 1e-5),
        _count(running, running, bank, key, gain),
    )
    yield Workload(
        "attention_residual.merge_norm",
        "",
        lambda: residual.merge_norm(partial, acc, top, top.abs() + 1, key, 1e-5, gain, 1e-5),
        _count(partial, partial, acc, top, top, key, gain),
    )


def _prepare(tokens: int) -> Workload:
    """The first phase, as deep in a model as it reaches."""
    bank, keys = _random(8, tokens, HIDDEN), _random(READERS, HIDDEN, dtype=torch.float32)
    return Workload(
        "attention_residual.block_prepare",
        "",
        lambda: residual.block_prepare(bank, keys, 1e-5),
        _count(bank, keys) + 4 * READERS * tokens * (HIDDEN + 2),
        held=False,
    )


def _attention(ranks: str, length: int) -> Iterator[Workload]:
    """A decode step of two requests of so many positions, in pages one after another."""
    heads, latent, rope = HEADS[ranks], 512, 64
    q, values, ropes = (
        _random(2, heads, latent + rope),
        _random(2 * length, latent),
        _random(2 * length, rope),
    )
    table = torch.arange(2 * length, dtype=torch.int32).view(2, length)
    rows = torch.arange(2)
    numbers = table, rows, torch.arange(3), rows * 0 + length - 1
    yield Workload(
        "mla.paged_attention",
        ranks,
        lambda: mla.attention(q, values, ropes, *numbers, 0.1, 1),
        _count(q, values, ropes) + _count(q) * latent // (latent + rope),
    )


def workloads(requests: int | None = None) -> list[Workload]:
    """On the default device. requests: of KDA, for each number of ranks; left out, as many as fill the cores
    with the larger tiles."""
    return [
        *_kda("TP16", requests or 4),
        *_kda("TP8", requests or 2),
        *(one for ranks in HEADS for one in _conv(ranks, 16)),
        *(one for ranks in HEADS for one in _attention(ranks, 4096)),
        *_rows(32),
        # Every core loads the key weight once: enough tokens that each has several.
        *_residual(96, 256),
        _prepare(64),
    ]
