"""The residual streams: two phases equal one, and the schedule of blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from sglang_k3.kernels.attention_residual import cpu, reference
from sglang_k3.kernels.rms_norm.cpu import rms_norm
from sglang_k3.models.attention_residual import BankedStream, Kernels, PlainStream, ResidualReader
from sglang_k3.models.layers import RMSNorm

WIDTH, EPS, BLOCK, LAYERS = 96, 1e-5, 3, 8


def kernels(module, exact: bool) -> Kernels:
    return Kernels(module.mix, module.block_prepare, module.merge_partial, EPS, exact)


class Norm(torch.nn.Module):
    """What a stream asks of the model's RMSNorm, whose kernels a served process chooses."""

    eps = EPS

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.linspace(0.5, 2.0, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def readers() -> tuple[list[tuple[ResidualReader, ResidualReader]], ResidualReader, list[torch.Tensor]]:
    """Attention and MLP reader of each layer, the final one, and the stacks a BankedStream wants."""
    generator = torch.Generator().manual_seed(1)
    pairs = [(ResidualReader(WIDTH), ResidualReader(WIDTH)) for _ in range(LAYERS)]
    last = ResidualReader(WIDTH)
    seen: dict[int, list[ResidualReader]] = {}
    for layer, (attention, mlp) in enumerate(pairs):
        seen.setdefault(-(-layer // BLOCK), []).append(attention)
        seen.setdefault(layer // BLOCK + 1, []).append(mlp)
    seen.setdefault(-(-LAYERS // BLOCK), []).append(last)
    stacks = []
    for rows in range(max(seen) + 1):
        for index, reader in enumerate(seen.get(rows, [])):
            reader.index = index
            reader.fold(torch.rand(WIDTH, generator=generator), torch.randn(1, WIDTH, generator=generator))
        group = [reader.key_weight for reader in seen.get(rows, [])]
        stacks.append(torch.stack(group) if group else torch.empty(0, WIDTH))
    return pairs, last, stacks


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_two_phases_give_what_the_plain_mix_gives(tokens: int) -> None:
    """Both streams get the same answers from the sub-layers, so only the mixes can differ."""
    pairs, last, stacks = readers()
    hidden = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
    blocks = -(-LAYERS // BLOCK)
    plain = BankedStream(hidden, blocks, stacks, kernels(reference, exact=True))
    phased = BankedStream(hidden, blocks, stacks, kernels(cpu, exact=False))
    assert phased.two_phase and not plain.two_phase

    def read(reader: ResidualReader) -> torch.Tensor:
        expected, got = plain.read(reader), phased.read(reader)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        return expected

    for layer, (attention, mlp) in enumerate(pairs):
        answer = torch.sin(read(attention) * 3)
        if layer % BLOCK == 0:
            plain.close_block()
            phased.close_block()
        plain.add(answer)
        phased.add(answer)
        answer = torch.cos(read(mlp) * 3)
        plain.add(answer)
        phased.add(answer)
    read(last)


@pytest.mark.parametrize("tokens, exact", [(5, False), (65, False), (5, True)])
def test_a_read_with_its_norm_in_one_operator_is_the_read_and_the_norm(tokens: int, exact: bool) -> None:
    """Of the first phase and the second, of the plain mix, and before there is a bank."""
    pairs, _, stacks = readers()
    first, second = pairs[0]
    norm, ran = cast(RMSNorm, Norm()), []
    hidden = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))

    def counted(name: str) -> Any:
        def call(*arguments: Any) -> torch.Tensor:
            ran.append(name)
            return getattr(cpu, name)(*arguments)

        return call

    parts = kernels(cpu, exact)
    fused = replace(parts, mix_norm=counted("mix_norm"), merge_norm=counted("merge_norm"))
    streams = [BankedStream(hidden, 3, stacks, chosen) for chosen in (parts, fused)]
    assert torch.equal(*(stream.read_normed(first, norm) for stream in streams))
    assert not ran
    for stream in streams:
        stream.close_block()
        stream.add(hidden.sin())
    apart, together = (stream.read_normed(second, norm) for stream in streams)
    assert torch.equal(apart, together) and torch.equal(apart, norm(streams[0].read(second)))
    assert ran == ["merge_norm" if streams[1].two_phase else "mix_norm"]
    assert streams[1].two_phase == (tokens <= 64 and not exact)


def test_the_bank_takes_the_sum_from_before_the_mix_and_the_sum_starts_anew() -> None:
    _, _, stacks = readers()
    stream = BankedStream(torch.ones(2, WIDTH), 3, stacks, kernels(reference, exact=True))
    stream.close_block()
    assert torch.equal(stream.bank[0], torch.ones(2, WIDTH))
    stream.add(torch.full((2, WIDTH), 5.0))
    assert stream.partial is not None and torch.equal(stream.partial, torch.full((2, WIDTH), 5.0))
    stream.add(torch.full((2, WIDTH), 2.0))
    stream.close_block()
    assert torch.equal(stream.bank[1], torch.full((2, WIDTH), 7.0))


def test_a_plain_stream_is_a_running_sum() -> None:
    stream = PlainStream(torch.ones(1, 4))
    stream.add(torch.full((1, 4), 2.0))
    assert stream.read(None).tolist() == [[3.0] * 4]
