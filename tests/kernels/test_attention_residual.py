"""Attention-residual mixes: what is normalised, one phase against two, bits in exact mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from sglang.srt.layers.attn_residual import aggregate_stream_torch
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNorm

from sglang_k3.kernels.attention_residual import cpu, reference
from tests.kernels.invariance import check_rows_keep_their_bits, same_bits

EPS = 1e-5
Mix = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _two_phase(
    module: ModuleType, partial: torch.Tensor, bank: torch.Tensor, key_weight: torch.Tensor
) -> torch.Tensor:
    """The second of two mixes, by way of a summary."""
    summary = module.block_prepare(bank, torch.stack([_random(len(key_weight), seed=9), key_weight]), EPS)
    fields = (field[1] for field in summary)
    return module.merge_partial(partial, *fields, key_weight, EPS)


def _reference_two_phase(
    partial: torch.Tensor, bank: torch.Tensor, key_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    return _two_phase(reference, partial, bank, key_weight)


def _cpu_two_phase(
    partial: torch.Tensor, bank: torch.Tensor, key_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    return _two_phase(cpu, partial, bank, key_weight)


FORMS = [reference.mix, cpu.mix, _reference_two_phase, _cpu_two_phase]


@pytest.mark.parametrize("mix", FORMS)
def test_keys_are_normalised_and_values_are_not(mix: Mix) -> None:
    # Both rows point along one axis, so their normalised keys are (sqrt 2, 0) and (0, sqrt 2) whatever
    # their lengths, 3 and 1000, and those lengths come out whole.
    partial, bank = torch.tensor([[3.0, 0.0]]), torch.tensor([[[0.0, 1000.0]]])
    key_weight = torch.tensor([1.0, 2.0])
    share = 1 / (1 + math.exp(-math.sqrt(2)))
    want = torch.tensor([[3 * (1 - share), 1000 * share]])
    torch.testing.assert_close(mix(partial, bank, key_weight, EPS), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("mix", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_bank_gives_the_running_sum_itself(mix: Mix, dtype: torch.dtype) -> None:
    partial = _random(7, 33).to(dtype)
    assert same_bits(mix(partial, partial.new_zeros(0, 7, 33), _random(33, seed=1), EPS), partial)


@pytest.mark.parametrize("mix", FORMS)
def test_equal_rows_are_averaged_evenly(mix: Mix) -> None:
    row = _random(1, 40)
    torch.testing.assert_close(mix(row, row.expand(4, 1, 40), _random(40, seed=1), EPS), row)


@pytest.mark.parametrize("mix", FORMS)
@pytest.mark.parametrize("tokens", [0, 1, 7, 16, 17, 100])
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("spread", [0.1, 1.0, 20.0])
def test_fp32_matches_fp64_whatever_the_spread_of_scores(
    mix: Mix, tokens: int, count: int, spread: float
) -> None:
    partial, bank = _random(tokens, 65), _random(count, tokens, 65, seed=1)
    key_weight = _random(65, seed=2) * spread  # scores have a deviation of 8 spread: up to about 500
    want = reference.mix(partial.double(), bank.double(), key_weight.double(), EPS)
    # A score of 500 has an error of 3e-5 in fp32, which is a relative error of the shares.
    tolerance = 2e-6 + 4e-6 * spread
    torch.testing.assert_close(
        mix(partial, bank, key_weight, EPS).double(), want, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("module", [reference, cpu])
@pytest.mark.parametrize("spread", [0.1, 1.0, 20.0])
def test_two_phases_equal_one(module: ModuleType, spread: float) -> None:
    partial, bank, key_weight = _random(50, 128), _random(8, 50, 128, seed=1), _random(128, seed=2) * spread
    scores = _random(9, 50)
    for row, rows in enumerate([*bank, partial]):
        scores[row] = (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS)) @ key_weight
    assert scores.std() > 10 * spread
    one = module.mix(partial, bank, key_weight, EPS)
    torch.testing.assert_close(_two_phase(module, partial, bank, key_weight), one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mix", FORMS)
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_row_size_moves_no_share(mix: Mix, scale: float) -> None:
    partial, bank, key_weight = _random(5, 64), _random(3, 5, 64, seed=1), _random(64, seed=2)
    want = reference.mix(partial.double() * scale, bank.double() * scale, key_weight.double(), 1e-40)
    got = _two_phase_eps(mix, partial * scale, bank * scale, key_weight)
    torch.testing.assert_close(got.double() / scale, want / scale, rtol=1e-5, atol=1e-6)


def _two_phase_eps(
    mix: Mix, partial: torch.Tensor, bank: torch.Tensor, key_weight: torch.Tensor
) -> torch.Tensor:
    """`mix` with an eps small beside the rows (0 would divide by zero for a row of zeros only)."""
    module = reference if mix in (reference.mix, _reference_two_phase) else cpu
    if mix in (reference.mix, cpu.mix):
        return mix(partial, bank, key_weight, 1e-40)
    summary = module.block_prepare(bank, key_weight.unsqueeze(0), 1e-40)
    return module.merge_partial(partial, *(field[0] for field in summary), key_weight, 1e-40)


@pytest.mark.parametrize("mix", FORMS)
def test_bf16_is_read_wide_and_rounded_once(mix: Mix) -> None:
    partial, bank, key_weight = (
        _random(9, 64).bfloat16(),
        _random(4, 9, 64, seed=1).bfloat16(),
        _random(64, seed=2),
    )
    out = mix(partial, bank, key_weight, EPS)
    assert out.dtype == torch.bfloat16
    want = reference.mix(partial.double(), bank.double(), key_weight.double(), EPS)
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("mix", FORMS)
def test_a_bank_that_is_part_of_a_larger_buffer(mix: Mix) -> None:
    buffer = _random(8, 32, 48)
    partial, key_weight = _random(5, 48, seed=1), _random(48, seed=2)
    bank = buffer[:3, 4:9]
    assert torch.equal(mix(partial, bank, key_weight, EPS), mix(partial, bank.contiguous(), key_weight, EPS))


@pytest.mark.parametrize("mix", FORMS)
def test_agrees_with_sglang(mix: Mix) -> None:
    partial, bank = _random(17, 96), _random(5, 17, 96, seed=1)
    norm_weight, projection = _random(96, seed=2), _random(1, 96, seed=3)

    def normed(rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(rows, (96,), norm_weight, EPS)

    def score(rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        return rows @ projection.T, None

    # Their two layers are called as functions; plain functions stand in for them.
    theirs = aggregate_stream_torch(partial, bank.transpose(0, 1), 5, cast(Any, score), cast(Any, normed))
    torch.testing.assert_close(
        mix(partial, bank, norm_weight * projection[0], EPS), theirs, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("width", [65, 128])
def test_mix_rows_keep_their_bits(width: int) -> None:
    partial, bank, key_weight = _random(35, width), _random(3, 35, width, seed=1), _random(width, seed=2)
    check_rows_keep_their_bits(lambda index: cpu.mix(partial[index], bank[:, index], key_weight, EPS), 35)


@pytest.mark.parametrize("count", [0, 3])
def test_two_phase_rows_keep_their_bits(count: int) -> None:
    partial, bank, key_weights = _random(35, 65), _random(count, 35, 65, seed=1), _random(2, 65, seed=2)

    def compute(index: torch.Tensor) -> list[torch.Tensor]:
        summary = cpu.block_prepare(bank[:, index], key_weights, EPS)
        merged = [
            cpu.merge_partial(partial[index], *(field[m] for field in summary), key_weights[m], EPS)
            for m in range(2)
        ]
        return [*merged, *(field.transpose(0, 1) for field in summary)]

    check_rows_keep_their_bits(compute, 35)


@pytest.mark.parametrize("module", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mix_with_the_next_norm_is_transformers_norm_of_the_mix(
    module: ModuleType, dtype: torch.dtype
) -> None:
    partial, bank, key = _random(3, 40).to(dtype), _random(4, 3, 40, seed=1).to(dtype), _random(40, seed=2)
    norm = KimiLinearRMSNorm(40, eps=EPS).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(_random(40, seed=3))
        want = norm(module.mix(partial, bank, key, EPS))
    got = module.mix_norm(partial, bank, key, EPS, norm.weight.detach(), EPS)
    torch.testing.assert_close(got, want, rtol=1e-6 if dtype == torch.float32 else 2**-8, atol=1e-6)
    summary = [field[0] for field in module.block_prepare(bank, key.unsqueeze(0), EPS)]
    merged = module.merge_norm(partial, *summary, key, EPS, norm.weight.detach(), EPS)
    torch.testing.assert_close(merged, got, rtol=1e-5 if dtype == torch.float32 else 2**-6, atol=1e-6)
