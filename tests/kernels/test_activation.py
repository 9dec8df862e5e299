"""SiTU and SiLU gating: values by hand, SGLang's module, and bits in exact mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from sglang.srt.layers.activation import SituAndMul

from sglang_k3.kernels.activation import cpu, reference
from tests.kernels.invariance import check_rows_keep_their_bits

Gated = Callable[[torch.Tensor, float | None, float | None], torch.Tensor]
FORMS = [reference.gated, cpu.gated]
BETAS = [(4.0, 25.0), (4.0, None), (None, None), (1.0, 3.0)]


def _random(tokens: int, width: int, scale: float = 5.0) -> torch.Tensor:
    return torch.randn(tokens, 2 * width, generator=torch.Generator().manual_seed(tokens + width)) * scale


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("gated", FORMS)
@pytest.mark.parametrize(
    ("gate", "up", "want"),
    [
        (0.0, 7.0, 0.0),
        # The sigmoid takes 8 itself, not the clipped 4 tanh(2).
        (8.0, 25.0, 4 * math.tanh(2) * _sigmoid(8) * 25 * math.tanh(1)),
        (-8.0, -25.0, 4 * math.tanh(2) * _sigmoid(-8) * 25 * math.tanh(1)),
        # Both paths saturate: 4 times 25.
        (1e4, 1e4, 100.0),
        (1e4, -1e4, -100.0),
        (-1e4, 1e4, 0.0),
    ],
)
def test_situ_by_hand(gated: Gated, gate: float, up: float, want: float) -> None:
    out = gated(torch.tensor([[gate, up]]), 4.0, 25.0)
    torch.testing.assert_close(out.item(), want, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("gated", FORMS)
def test_up_is_left_raw_without_a_linear_beta(gated: Gated) -> None:
    want = 4 * math.tanh(0.5) * _sigmoid(2) * 1000
    torch.testing.assert_close(
        gated(torch.tensor([[2.0, 1000.0]]), 4.0, None).item(), want, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("gated", FORMS)
def test_without_a_beta_it_is_silu_and_the_linear_beta_is_ignored(gated: Gated) -> None:
    x = torch.tensor([[2.0, 1000.0]])
    torch.testing.assert_close(gated(x, None, None).item(), 2 * _sigmoid(2) * 1000, rtol=1e-6, atol=0)
    assert torch.equal(gated(x, None, 25.0), gated(x, None, None))


@pytest.mark.parametrize("gated", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_agrees_with_sglang(gated: Gated, dtype: torch.dtype, linear_beta: float | None) -> None:
    x = _random(33, 100, scale=20).to(dtype)
    want = SituAndMul(4.0, linear_beta).forward_native(x)
    got = gated(x, 4.0, linear_beta)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=2e-6 if dtype == torch.float32 else 2**-8, atol=1e-30)


@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("tokens", [0, 1, 7, 16, 17, 100])
def test_fp32_matches_fp64(betas: tuple[float | None, float | None], tokens: int) -> None:
    x = _random(tokens, 37)
    torch.testing.assert_close(
        cpu.gated(x, *betas).double(), reference.gated(x.double(), *betas), rtol=2e-6, atol=0
    )


def test_fp32_is_right_relative_to_its_size_at_every_magnitude() -> None:
    sizes = torch.logspace(-30, 1.5, 2000)
    gates = torch.cat([sizes, -sizes])
    x = torch.stack([gates, gates.flip(0)], dim=1)
    want = reference.gated(x.double(), 4.0, 25.0)
    torch.testing.assert_close(cpu.gated(x, 4.0, 25.0).double(), want, rtol=2e-6, atol=1e-44)


@pytest.mark.parametrize("gated", FORMS)
@pytest.mark.parametrize("betas", BETAS)
def test_infinities_saturate_and_nan_stays_nan(
    gated: Gated, betas: tuple[float | None, float | None]
) -> None:
    out = gated(torch.tensor([[math.nan, 1.0], [1.0, math.nan], [math.inf, 1.0], [100.0, math.inf]]), *betas)
    assert torch.isnan(out[:2]).all()
    beta, linear_beta = betas
    assert out[2].item() == pytest.approx(
        math.inf
        if beta is None
        else beta * (1 if linear_beta is None else linear_beta * math.tanh(1 / linear_beta))
    )
    assert out[3].item() == pytest.approx(
        math.inf if linear_beta is None or beta is None else beta * linear_beta
    )


@pytest.mark.parametrize("gated", FORMS)
def test_strided_rows(gated: Gated) -> None:
    wide = _random(17, 60)
    torch.testing.assert_close(gated(wide[:, ::3], 4.0, 25.0), gated(wide[:, ::3].contiguous(), 4.0, 25.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("betas", BETAS)
def test_rows_keep_their_bits(dtype: torch.dtype, betas: tuple[float | None, float | None]) -> None:
    x = _random(35, 61).to(dtype)  # 61: a vector body and a tail
    check_rows_keep_their_bits(lambda index: cpu.gated(x[index], *betas), 35)


def test_an_elements_bits_do_not_depend_on_its_column() -> None:
    row = _random(1, 61)
    gate, up = row.chunk(2, dim=1)
    whole = cpu.gated(row, 4.0, 25.0)
    for start in (1, 3, 30, 60):
        part = torch.cat([gate[:, start:], up[:, start:]], dim=1)
        assert torch.equal(cpu.gated(part, 4.0, 25.0), whole[:, start:])


# --- quantised again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [reference, cpu], ids=["reference", "cpu"])
def test_quantised_forms_round_the_activation_once(module: ModuleType) -> None:
    """In bfloat16 too: what is quantised is the fp32 result, not its rounding."""
    gate_up = _random(3, 64).bfloat16()
    rows = module.gated(gate_up.float(), 4.0, 25.0)
    codes, scales = module.gated_mxfp8(gate_up, 4.0, 25.0)
    back = codes.float().view(3, 2, 32) * torch.exp2(scales.float() - 127).unsqueeze(-1)
    step = torch.maximum(rows.view(3, 2, 32).abs() / 16, torch.exp2(scales.float() - 137).unsqueeze(-1))
    assert ((back - rows.view(3, 2, 32)).abs() <= step).all()
    codes, scales = module.gated_int8(gate_up, 4.0, 25.0)
    assert torch.equal(scales, rows.abs().amax(-1) / 127) and codes.abs().amax(-1).tolist() == [127] * 3
    assert ((codes * scales.unsqueeze(-1) - rows).abs() <= 0.501 * scales.unsqueeze(-1)).all()


@pytest.mark.parametrize("form", [cpu.gated_int8, cpu.gated_mxfp8])
def test_quantised_rows_keep_their_bits(form: Callable) -> None:
    gate_up = _random(5, 64)
    codes, scales = form(gate_up, 4.0, 25.0)
    for row in range(5):
        alone, scale = form(gate_up[row : row + 1], 4.0, 25.0)
        assert torch.equal(alone.view(torch.int8)[0], codes.view(torch.int8)[row])
        assert torch.equal(scale[0], scales[row])
