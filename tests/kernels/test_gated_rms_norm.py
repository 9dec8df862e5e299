"""RMSNorm of each head times the sigmoid of its gate."""

from __future__ import annotations

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated

from sglang_k3.kernels.gated_rms_norm import cpu, reference
from sglang_k3.kernels.registry import Call, choose
from tests.kernels.invariance import check_rows_keep_their_bits, same_bits, torch_threads
from tests.kernels.spans import scaled_error

EPS = 1e-5
NORMS = pytest.mark.parametrize("norm", [reference.gated_rms_norm, cpu.gated_rms_norm], ids=["ref", "numba"])


def _case(tokens: int, heads: int = 3, width: int = 60) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r = torch.Generator().manual_seed(tokens + width)
    return (
        torch.randn(tokens, heads, width, generator=r),
        3 * torch.randn(tokens, heads * width, generator=r),
        torch.randn(width, generator=r),
    )


def test_registry_gives_the_numba_kernel_in_both_modes():
    for exact in (False, True):
        assert choose("gated_rms_norm", Call("cpu", torch.bfloat16, exact)) is cpu.gated_rms_norm
    assert choose("gated_rms_norm", Call("cpu", torch.float64)) is reference.gated_rms_norm


@NORMS
def test_agrees_with_transformers(norm):
    o, gate, weight = _case(7)
    layer = KimiLinearRMSNormGated(60, eps=EPS)
    with torch.no_grad():
        layer.weight.copy_(weight)
        want = layer(o, gate.view(7, 3, 60)).flatten(1)
    got = norm(o, gate, weight, EPS)
    assert got.shape == (7, 180)
    assert scaled_error(got, want) < 1e-6


@pytest.mark.parametrize("width", [1, 5, 60, 100, 128])
def test_agrees_with_fp64_for_any_width(width):
    o, gate, weight = _case(4, width=width)
    want = reference.gated_rms_norm(o.double(), gate.double(), weight.double(), EPS)
    assert scaled_error(cpu.gated_rms_norm(o, gate, weight, EPS), want) < 1e-6


@NORMS
def test_bf16_is_rounded_once(norm):
    o, gate, weight = _case(5)
    o, gate = o.bfloat16(), gate.bfloat16()
    got = norm(o, gate, weight, EPS)
    assert same_bits(got, norm(o.float(), gate.float(), weight, EPS).bfloat16())


@NORMS
def test_rows_of_zeros_stay_finite(norm):
    out = norm(torch.zeros(2, 3, 60), torch.full((2, 180), -200.0), torch.ones(60), EPS)
    assert torch.equal(out.abs(), torch.zeros(2, 180))


def test_each_token_keeps_its_bits_in_any_batch():
    o, gate, weight = _case(13)
    with torch_threads(2):
        check_rows_keep_their_bits(lambda index: cpu.gated_rms_norm(o[index], gate[index], weight, EPS), 13)


@NORMS
def test_no_tokens(norm):
    o, gate, weight = _case(0)
    assert norm(o, gate, weight, EPS).shape == (0, 180)
