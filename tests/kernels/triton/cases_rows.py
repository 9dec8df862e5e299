"""Triton kernels that take rows one by one: gated norm, activations."""

from __future__ import annotations

import math

import pytest
import torch
from sglang.srt.layers.activation import SituAndMul
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated

from sglang_k3.kernels import ascend, registry
from sglang_k3.kernels.activation import ascend_triton as activation
from sglang_k3.kernels.activation import reference as activation_reference
from sglang_k3.kernels.gated_rms_norm import ascend_triton as norm
from sglang_k3.kernels.gated_rms_norm import reference as norm_reference
from sglang_k3.kernels.mx.reference import dequantize_mxfp8, quantize_mxfp8
from sglang_k3.kernels.registry import Call
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


# --- with the output quantised again -----------------------------------------------------------------------

BETAS = pytest.mark.parametrize("betas", [(4.0, 25.0), (4.0, None), (None, None)], ids=str)


def _spread(tokens: int, width: int) -> torch.Tensor:
    """[T, 2 width]: magnitudes over eight decades, with zeros, so that every branch of a rounding is met."""
    sizes = torch.logspace(-7, 1, 2 * width)[torch.randperm(2 * width, generator=torch.Generator())]
    rows = _random(tokens, 2 * width) * sizes
    rows[0, : width // 2] = 0.0
    return rows


@BETAS
@pytest.mark.parametrize("width", [64, 1056])
def test_mxfp8_codes_are_those_of_the_activation_rounded_once(betas: tuple, width: int):
    """Bit for bit: the oracle of the format on what the plain kernel gives in fp32."""
    gate_up = _spread(5, width)
    with recording():
        codes, scales = activation.gated_mxfp8(gate_up, *betas)
    want_codes, want_scales = quantize_mxfp8(activation.gated(gate_up, *betas))
    assert torch.equal(scales, want_scales)
    assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp8_reads_back_within_its_step(dtype: torch.dtype):
    gate_up = (5 * _random(3, 2 * 96)).to(dtype)
    got = dequantize_mxfp8(*activation.gated_mxfp8(gate_up, 4.0, 25.0), torch.float32).view(3, -1, 32)
    want = activation_reference.gated(gate_up.float(), 4.0, 25.0).view(3, -1, 32)
    # Three bits of mantissa, of the block's largest where an element is too small for a step of its own.
    step = torch.maximum(want.abs() / 16, want.abs().amax(-1, keepdim=True) / 448 / 512)
    assert ((got - want).abs() <= 1.001 * step).all() and want.abs().max() > 10


def test_mxfp8_codes_at_ties_and_at_the_ends_of_the_range():
    """A gate so large that silu is the gate: its products with `up` are the numbers that are rounded."""
    ups = torch.tensor([448.0, 432.0, 17.0, 19.0, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9, 2.0**-6, 0.0, -17.0])
    row = torch.cat([ups, -ups, torch.zeros(12)])
    gate_up = torch.cat([torch.full((32,), 64.0), row / 64]).view(1, 64)
    codes, scales = activation.gated_mxfp8(gate_up, None, None)
    want = torch.tensor([448.0, 448.0, 16.0, 20.0, 2.0**-9, 0.0, 2.0**-8, 2.0**-6, 0.0, -16.0])
    assert scales.tolist() == [[127]]
    assert torch.equal(codes.float()[0], torch.cat([want, -want, torch.zeros(12)]))
    # The next larger number than 448 needs the next power of two.
    gate_up[0, 32] = torch.nextafter(torch.tensor(7.0), torch.tensor(8.0))
    assert activation.gated_mxfp8(gate_up, None, None)[1].tolist() == [[128]]


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_what_is_not_finite_reads_back_as_nan(bad: float):
    gate_up = _random(2, 2 * 64)
    gate_up[1, 64 + 40] = bad
    codes, scales = activation.gated_mxfp8(gate_up, None, None)
    back = dequantize_mxfp8(codes, scales, torch.float32)
    assert back[1, 32:].isnan().all() and back[1, :32].isfinite().all() and back[0].isfinite().all()
    codes, scales = activation.gated_int8(gate_up, None, None)
    assert scales.isnan().tolist() == [False, True] and not codes[1].any() and codes[0].any()
    assert activation_reference.gated_int8(gate_up, None, None)[1].isnan().tolist() == [False, True]


@BETAS
@pytest.mark.parametrize("width", [33, 1100])
def test_int8_codes_are_those_of_the_activation_rounded_once(betas: tuple, width: int):
    gate_up = _spread(4, width)
    gate_up[3] = 0.0
    with recording():
        codes, scales = activation.gated_int8(gate_up, *betas)
    rows = activation.gated(gate_up, *betas)
    assert torch.equal(scales, rows.abs().amax(-1).clamp_min(1e-10) / 127)
    assert torch.equal(codes, (rows / scales.unsqueeze(-1)).round().to(torch.int8))
    assert codes.abs().amax(-1).tolist() == [127, 127, 127, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_the_oracle_to_a_step(dtype: torch.dtype):
    gate_up = (5 * _random(3, 2 * 96)).to(dtype)
    codes, scales = activation.gated_int8(gate_up, 4.0, 25.0)
    want_codes, want_scales = activation_reference.gated_int8(gate_up, 4.0, 25.0)
    assert scaled_error(scales, want_scales) < 1e-6
    assert int((codes.int() - want_codes.int()).abs().max()) <= 1
    assert float((codes != want_codes).float().mean()) < 0.01


def test_quantised_forms_say_what_they_do_not_take(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="5000 columns"):
        activation.gated_int8(torch.zeros(1, 10_000), 4.0, 25.0)
    with pytest.raises(ValueError, match="40 columns are not in blocks of 32"):
        activation.gated_mxfp8(torch.zeros(1, 80), 4.0, 25.0)
    entries = {
        operator: next(one for one in registry.implementations(operator) if one.name == "triton")
        for operator in ("activation.gated_int8", "activation.gated_mxfp8")
    }

    def reason(operator: str, **dims: int) -> str | None:
        return entries[operator].refusal(Call("npu", torch.bfloat16, dims=dims))

    assert "5000 columns" in (reason("activation.gated_int8", inner=5000) or "")
    assert reason("activation.gated_int8", inner=3072) is None
    assert "format of the Ascend 950" in (reason("activation.gated_mxfp8", inner=3072) or "")
    monkeypatch.setattr(ascend, "chip", lambda: "Ascend950PR_9579")
    assert reason("activation.gated_mxfp8", inner=3072) is None
    assert "inner 3080" in (reason("activation.gated_mxfp8", inner=3080) or "")
