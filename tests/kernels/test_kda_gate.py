"""Log decay and step size."""

from __future__ import annotations

import pytest
import torch

from sglang_k3.kernels.kda import cpu, reference
from tests.kernels.invariance import check_rows_keep_their_bits, torch_threads
from tests.kernels.spans import scaled_error

HEADS, WIDTH = 3, 60


def _case(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    r = torch.Generator().manual_seed(tokens)
    f = (4 * torch.randn(tokens, HEADS * WIDTH, generator=r)).to(dtype)
    b = torch.randn(tokens, HEADS, generator=r).to(dtype)
    return f, b, torch.randn(HEADS, generator=r), torch.randn(HEADS * WIDTH, generator=r)


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_agrees_with_fp64(bound, dtype):
    f, b, A_log, dt_bias = _case(7, dtype)
    want_g, want_beta = reference.gate(f.double(), b.double(), A_log, dt_bias, bound)
    for gate in (cpu.gate, reference.gate):
        g, beta = gate(f, b, A_log, dt_bias, bound)
        assert g.dtype == beta.dtype == torch.float32
        assert g.shape == (7, HEADS, WIDTH) and beta.shape == (7, HEADS)
        assert scaled_error(g, want_g) < 5e-7
        assert scaled_error(beta, want_beta) < 2e-7


@pytest.mark.parametrize("gate", [reference.gate, cpu.gate])
def test_safe_gate_reaches_its_bound_and_zero_and_stays_finite(gate):
    f = torch.tensor([[1e4, 200.0, -200.0, -1e4]])
    g, beta = gate(f, torch.tensor([[1e4, -1e4]]), torch.zeros(2), torch.zeros(4), -5.0)
    torch.testing.assert_close(g.flatten(), torch.tensor([-5.0, -5.0, 0.0, 0.0]), rtol=0, atol=1e-30)
    assert beta.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("gate", [reference.gate, cpu.gate])
def test_unbounded_gate_is_linear_for_large_inputs(gate):
    g, _ = gate(torch.tensor([[1000.0, -1000.0]]), torch.zeros(1, 1), torch.ones(1), torch.zeros(2), None)
    torch.testing.assert_close(g.flatten(), torch.tensor([-1000 * torch.e, 0.0]))


def test_each_token_keeps_its_bits_in_any_batch():
    f, b, A_log, dt_bias = _case(13)
    with torch_threads(2):
        for bound in (-5.0, None):
            check_rows_keep_their_bits(
                lambda index, bound=bound: cpu.gate(f[index], b[index], A_log, dt_bias, bound), 13
            )


def test_no_tokens_give_empty_gates():
    f, b, A_log, dt_bias = _case(0)
    g, beta = cpu.gate(f, b, A_log, dt_bias, -5.0)
    assert g.shape == (0, HEADS, WIDTH) and beta.shape == (0, HEADS)
