"""Triton kernels that take rows one by one: gated norm, activations."""

from __future__ import annotations

import math

import pytest
import torch
from sglang.srt.layers.activation import SituAndMul
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated

from sglang_k3.kernels.activation import ascend_triton as activation
from sglang_k3.kernels.activation import reference as activation_reference
from sglang_k3.kernels.gated_rms_norm import ascend_triton as norm
from sglang_k3.kernels.gated_rms_norm import reference as norm_reference
from tests.kernels.spans import scaled_error
from tests.kernels.triton.recorder import recording

EPS = 1e-5
DTYPES = pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@DTYPES
@pytest.mark.parametrize("tokens, heads, width", [(7, 3, 60), (1, 1, 128), (11, 3, 24)])
def test_gated_norm(dtype: torch.dtype, tolerance: float, tokens: int, heads: int, width: int):
    o = _random(tokens, heads, width).to(dtype)
    gate = 3 * _random(tokens, heads * width, seed=1).to(dtype)
    weight = _random(width, seed=2)
    with recording():
        got = norm.gated_rms_norm(o, gate, weight, EPS)
    want = norm_reference.gated_rms_norm(o.double(), gate.double(), weight, EPS)
    assert got.dtype == dtype and scaled_error(got, want) < tolerance


def test_gated_norm_is_transformers():
    o, gate, weight = _random(7, 3, 64), _random(7, 192, seed=1), _random(64, seed=2)
    layer = KimiLinearRMSNormGated(64, eps=EPS)
    with torch.no_grad():
        layer.weight.copy_(weight)
        want = layer(o, gate.view(7, 3, 64)).flatten(1)
    assert scaled_error(norm.gated_rms_norm(o, gate, weight, EPS), want) < 1e-6


@DTYPES
@pytest.mark.parametrize("betas", [(4.0, 25.0), (4.0, None), (None, None), (1.0, 3.0)], ids=str)
def test_activations(dtype: torch.dtype, tolerance: float, betas: tuple[float | None, float | None]):
    gate_up = (5 * _random(3, 2 * 1100)).to(dtype)
    with recording():
        got = activation.gated(gate_up, *betas)
    want = activation_reference.gated(gate_up.double(), *betas)
    assert got.dtype == dtype and scaled_error(got, want) < tolerance


def test_activation_saturates_without_nan():
    gate_up = torch.tensor([[1e4, 1e4, -1e4, 0.0, 1e4, -1e4, 1e4, 7.0]])
    got = activation.gated(gate_up, 4.0, 25.0)
    assert got.tolist() == [[100.0, -100.0, 0.0, 0.0]]


def test_activation_is_sglangs_module():
    gate_up = 5 * _random(4, 2 * 33)
    want = SituAndMul(beta=4.0, linear_beta=25.0).forward_native(gate_up)
    assert scaled_error(activation.gated(gate_up, 4.0, 25.0), want) < 1e-6
    assert math.isclose(
        float(want.abs().max()), float(activation.gated(gate_up, 4.0, 25.0).abs().max()), rel_tol=1e-6
    )
