"""Linear maps: against the product in fp64, and bit by bit in exact mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_k3.kernels.linear import cpu, reference
from sglang_k3.kernels.linear.rows import batched_rows, rows
from tests.kernels.invariance import check_rows_keep_their_bits, same_bits

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

TOKENS = [0, 1, 7, 16, 17, 100]
PLAIN = [reference.linear, cpu.linear, cpu.linear_row_blocks, rows]
PER_HEAD = [reference.linear_batched, cpu.linear_batched, cpu.linear_batched_row_blocks, batched_rows]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _assert_near(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor) -> None:
    """Within 1e-6 of the sum of the products' magnitudes, which is what rounding scales with."""
    assert got.shape == want.shape
    assert ((got.double() - want).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("linear", PLAIN)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (33, 9), (65, 8), (128, 100), (576, 48)])
def test_linear_is_the_matrix_product(linear: Linear, tokens: int, inputs: int, outputs: int) -> None:
    x, weight = _random(tokens, inputs), _random(outputs, inputs, seed=1)
    _assert_near(
        linear(x, weight), x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    )


@pytest.mark.parametrize("linear", PER_HEAD)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(1, 1, 1), (3, 33, 9), (4, 128, 64)])
def test_batched_linear_is_a_product_per_head(
    linear: Linear, tokens: int, heads: int, inputs: int, outputs: int
) -> None:
    x, weight = _random(tokens, heads, inputs).double(), _random(heads, inputs, outputs, seed=1).double()
    want = torch.stack([x[:, h] @ weight[h] for h in range(heads)], dim=1)
    size = torch.stack([x[:, h].abs() @ weight[h].abs() for h in range(heads)], dim=1)
    _assert_near(linear(x.float(), weight.float()), want, size)


@pytest.mark.parametrize("linear", PLAIN)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_tiny_and_huge_rows_neither_vanish_nor_overflow(linear: Linear, scale: float) -> None:
    x, weight = _random(7, 64) * scale, _random(24, 64, seed=1)
    _assert_near(
        linear(x, weight), x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    )


@pytest.mark.parametrize("linear", PLAIN)
def test_strided_operands_give_what_contiguous_ones_give(linear: Linear) -> None:
    x, weight = _random(40, 9).T, _random(40, 12, seed=1).T
    torch.testing.assert_close(linear(x, weight), linear(x.contiguous(), weight.contiguous()))


@pytest.mark.parametrize("linear", PER_HEAD)
def test_batched_linear_takes_a_slice_of_wider_rows(linear: Linear) -> None:
    x, weight = _random(17, 3, 40)[..., :24], _random(3, 24, 8, seed=1)
    torch.testing.assert_close(linear(x, weight), linear(x.contiguous(), weight))


@pytest.mark.parametrize("linear", [reference.linear, cpu.linear, cpu.linear_widened])
@pytest.mark.parametrize(("tokens", "outputs"), [(0, 32), (1, 32), (7, 32), (8, 1), (17, 32), (30, 3000)])
def test_bf16_rounds_once_at_the_end(linear: Linear, tokens: int, outputs: int) -> None:
    x, weight = _random(tokens, 256).bfloat16(), _random(outputs, 256, seed=1).bfloat16()
    out = linear(x, weight)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=2**-8, atol=1e-4)


def test_a_weight_that_could_take_a_gradient_is_accepted() -> None:
    weight = torch.nn.Parameter(_random(8, 16))
    assert same_bits(
        cpu.linear_row_blocks(_random(3, 16), weight), cpu.linear_row_blocks(_random(3, 16), weight.data)
    )


# Shapes of a small model, row lengths that are no multiple of a vector, and the odd ones with few outputs
# where this BLAS is known to order sums by row.
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(1, 1), (33, 9), (65, 8), (777, 3), (7, 100), (96, 1), (128, 12), (300, 77), (576, 640), (1024, 512)],
)
def test_exact_rows_keep_their_bits(inputs: int, outputs: int) -> None:
    x, weight = _random(35, inputs), _random(outputs, inputs, seed=1)
    check_rows_keep_their_bits(lambda index: cpu.linear_row_blocks(x[index], weight), 35)


@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(3, 33, 9), (4, 16, 64), (8, 128, 64), (1, 65, 1)])
def test_exact_batched_rows_keep_their_bits(heads: int, inputs: int, outputs: int) -> None:
    x, weight = _random(35, heads, inputs), _random(heads, inputs, outputs, seed=1)
    check_rows_keep_their_bits(lambda index: cpu.linear_batched_row_blocks(x[index], weight), 35)


def test_the_loops_keep_bits_too() -> None:
    x, weight = _random(19, 65), _random(8, 65, seed=1)
    check_rows_keep_their_bits(lambda index: rows(x[index], weight), 19)
    per_head = _random(19, 2, 33)
    check_rows_keep_their_bits(lambda index: batched_rows(per_head[index], _random(2, 33, 5, seed=1)), 19)


def test_the_check_itself_notices_a_row_that_sees_its_batch() -> None:
    x = _random(20, 8)
    with pytest.raises(AssertionError):
        check_rows_keep_their_bits(lambda index: x[index] + x[index].mean(), 20)
    with pytest.raises(AssertionError):
        check_rows_keep_their_bits(lambda index: x[index] * (1 + 1e-7 * (len(index) >= 16)), 20)


def _sums_by_place(block: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(block, weight.T, out=out)
    out[3] = (block[3].flip(0) @ weight.T.flip(0)) * (1 + 1e-6)


def _sums_by_company(block: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(block, weight.T, out=out)
    out += block.sum() * 1e-6


@pytest.mark.parametrize("product", [_sums_by_place, _sums_by_company])
def test_a_blas_that_orders_sums_by_row_is_found_out_and_replaced(
    product: cpu.Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = _random(20, 32), _random(16, 32, seed=1)
    monkeypatch.setattr(cpu, "_tried", {})
    monkeypatch.setattr(cpu, "_multiply", product)
    assert same_bits(cpu.linear_row_blocks(x, weight), rows(x, weight))
    assert list(cpu._tried.values()) == [False]


def test_a_blas_that_keeps_rows_is_tried_once_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def exact_product(block: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        calls.append(len(block))
        out.copy_(rows(block, weight) * 2)

    monkeypatch.setattr(cpu, "_tried", {})
    monkeypatch.setattr(cpu, "_multiply", exact_product)
    x, weight = _random(20, 32), _random(16, 32, seed=1)
    for _ in range(2):
        assert same_bits(cpu.linear_row_blocks(x, weight), rows(x, weight) * 2)
    assert calls == [cpu.ROWS] * (3 + 2 + 2)
