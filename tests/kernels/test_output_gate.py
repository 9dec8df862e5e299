"""MLA's output gate against its oracle."""

from __future__ import annotations

import pytest
import torch

from sglang_k3.kernels.output_gate import cpu, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 7, 33])
def test_gate_matches_the_oracle(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    o = torch.randn(rows, 60, generator=generator).to(dtype)
    gate = (torch.randn(rows, 60, generator=generator) * 20).to(dtype)
    torch.testing.assert_close(
        cpu.output_gate(o, gate),
        reference.output_gate(o, gate),
        rtol=1e-6 if dtype == torch.float32 else 1e-2,
        atol=1e-7,
    )


def test_a_closed_gate_stops_the_output_and_an_open_one_passes_it() -> None:
    o = torch.tensor([[3.0, -2.0, 5.0]])
    gate = torch.tensor([[-200.0, 200.0, 0.0]])
    assert cpu.output_gate(o, gate).tolist() == [[0.0, -2.0, 2.5]]


def test_a_rows_bits_do_not_depend_on_the_batch() -> None:
    o, gate = torch.randn(33, 61), torch.randn(33, 61)
    whole = cpu.output_gate(o, gate)
    for row in (0, 5, 32):
        assert torch.equal(cpu.output_gate(o[row : row + 1], gate[row : row + 1])[0], whole[row])
