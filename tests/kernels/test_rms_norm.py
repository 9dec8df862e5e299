"""RMSNorm: values, rounding order, and bits in exact mode."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sglang_k3.kernels.rms_norm import cpu, reference
from tests.kernels.invariance import check_rows_keep_their_bits

RmsNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
FORMS = [reference.rms_norm, cpu.rms_norm]


def _inputs(tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + width)
    return torch.randn(tokens, width, generator=generator), torch.randn(width, generator=generator)


@pytest.mark.parametrize("rms_norm", FORMS)
def test_value_by_hand(rms_norm: RmsNorm) -> None:
    out = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, -1.0]), 0.0)
    torch.testing.assert_close(out, torch.tensor([[6.0, -4.0]]) / math.sqrt(12.5))


@pytest.mark.parametrize("rms_norm", FORMS)
@pytest.mark.parametrize("tokens", [0, 1, 7, 16, 17, 100])
@pytest.mark.parametrize("width", [1, 7, 60, 128, 515])
def test_fp32_matches_fp64(rms_norm: RmsNorm, tokens: int, width: int) -> None:
    x, weight = _inputs(tokens, width)
    want = reference.rms_norm(x.double(), weight.double(), 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rms_norm", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_transformers(rms_norm: RmsNorm, dtype: torch.dtype) -> None:
    x, weight = (tensor.to(dtype) for tensor in _inputs(33, 200))
    theirs = LlamaRMSNorm(200, eps=1e-5).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(weight)
        want = theirs(x)
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    if dtype == torch.bfloat16:
        # Both round before the weight; a value on a rounding edge may fall either way.
        assert (got != want).float().mean() < 0.01
    torch.testing.assert_close(got, want, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=1e-7)


@pytest.mark.parametrize("rms_norm", FORMS)
def test_rounds_to_the_activation_type_before_the_weight(rms_norm: RmsNorm) -> None:
    # Normalised: 255/256 * sqrt(2), 1.40869..., is 1.40625 in bf16; times 129/128 it rounds to 1.4140625.
    # Rounded once, after the weight, it would be 1.421875.
    x = torch.tensor([[255 / 256, 0.0]], dtype=torch.bfloat16)
    weight = torch.tensor([129 / 128, 1.0], dtype=torch.bfloat16)
    eps = 0.5 - (255 / 256) ** 2 / 2  # makes mean(x^2) + eps one half
    assert rms_norm(x, weight, eps)[0, 0].item() == 1.4140625


@pytest.mark.parametrize("rms_norm", FORMS)
def test_zero_rows_stay_zero_and_size_does_not_matter(rms_norm: RmsNorm) -> None:
    x, weight = _inputs(3, 64)
    assert rms_norm(torch.zeros(2, 64), weight, 1e-5).abs().max() == 0
    want = rms_norm(x, weight, 0.0)
    for scale in (2.0**-50, 2.0**50):
        torch.testing.assert_close(rms_norm(x * scale, weight, 0.0), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rms_norm", FORMS)
def test_strided_rows(rms_norm: RmsNorm) -> None:
    x, weight = _inputs(40, 17)
    torch.testing.assert_close(
        rms_norm(x.T, weight[:1].expand(40), 1e-5), rms_norm(x.T.contiguous(), weight[:1].expand(40), 1e-5)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 128, 515])
def test_rows_keep_their_bits(dtype: torch.dtype, width: int) -> None:
    x, weight = (tensor.to(dtype) for tensor in _inputs(35, width))
    check_rows_keep_their_bits(lambda index: cpu.rms_norm(x[index], weight, 1e-5), 35)
