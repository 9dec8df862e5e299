"""Linear maps: against the product in fp64, and bit by bit in exact mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_k3.kernels.linear import cpu, reference
from tests.kernels.invariance import check_rows_keep_their_bits, same_bits

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

TOKENS = [0, 1, 7, 16, 17, 100]
PLAIN = [reference.linear, cpu.linear, cpu.linear_by_rows, cpu.linear_row_dots]
PER_HEAD = [
    reference.linear_batched,
    cpu.linear_batched,
    cpu.linear_batched_by_rows,
    cpu.linear_batched_row_dots,
]


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
    x, weight = _random(tokens, heads, inputs).double(), _random(heads, outputs, inputs, seed=1).double()
    want = torch.stack([x[:, h] @ weight[h].T for h in range(heads)], dim=1)
    size = torch.stack([x[:, h].abs() @ weight[h].abs().T for h in range(heads)], dim=1)
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
    x, weight = _random(17, 3, 40)[..., :24], _random(3, 8, 24, seed=1)
    torch.testing.assert_close(linear(x, weight), linear(x.contiguous(), weight))


@pytest.mark.parametrize("linear", [reference.linear, cpu.linear, cpu.linear_by_rows, cpu.linear_row_dots])
@pytest.mark.parametrize(
    ("tokens", "outputs"), [(0, 32), (1, 32), (7, 32), (8, 1), (17, 32), (15, 33), (16, 3000), (30, 3000)]
)
def test_bf16_rounds_once_at_the_end(
    linear: Linear, tokens: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_TILE_NUMBERS", 1 << 16)
    x, weight = _random(tokens, 256).bfloat16(), _random(outputs, 256, seed=1).bfloat16()
    out = linear(x, weight)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=2**-8, atol=1e-4)


def test_a_weight_that_could_take_a_gradient_is_accepted() -> None:
    weight = torch.nn.Parameter(_random(8, 16))
    assert same_bits(
        cpu.linear_row_dots(_random(3, 16), weight), cpu.linear_row_dots(_random(3, 16), weight.data)
    )


# Shapes of a small model, row lengths that are no multiple of a vector, and outputs that fill no group.
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(1, 1), (33, 9), (65, 8), (777, 3), (7, 100), (96, 1), (128, 12), (300, 77), (576, 640), (1024, 512)],
)
def test_exact_rows_keep_their_bits(inputs: int, outputs: int) -> None:
    x, weight = _random(35, inputs), _random(outputs, inputs, seed=1)
    check_rows_keep_their_bits(lambda index: cpu.linear_row_dots(x[index], weight), 35)


@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(3, 33, 9), (4, 16, 64), (8, 128, 64), (1, 65, 1)])
def test_exact_batched_rows_keep_their_bits(heads: int, inputs: int, outputs: int) -> None:
    x, weight = _random(35, heads, inputs), _random(heads, outputs, inputs, seed=1)
    check_rows_keep_their_bits(lambda index: cpu.linear_batched_row_dots(x[index], weight), 35)


def test_few_rows_have_the_exact_forms_bits() -> None:
    x, weight = _random(15, 65), _random(8, 65, seed=1)
    assert same_bits(cpu.linear_by_rows(x, weight), cpu.linear_row_dots(x, weight))


def test_the_check_itself_notices_a_row_that_sees_its_batch() -> None:
    x = _random(20, 8)
    with pytest.raises(AssertionError):
        check_rows_keep_their_bits(lambda index: x[index] + x[index].mean(), 20)
    with pytest.raises(AssertionError):
        check_rows_keep_their_bits(lambda index: x[index] * (1 + 1e-7 * (len(index) >= 16)), 20)


@pytest.mark.parametrize("linear", [cpu.linear_by_rows, cpu.linear_batched_by_rows])
@pytest.mark.parametrize("tokens", TOKENS)
def test_fp32_rows_meet_a_bf16_weight_without_rounding(linear: Linear, tokens: int) -> None:
    heads = () if linear is cpu.linear_by_rows else (3,)
    x, weight = _random(tokens, *heads, 65), _random(*heads, 9, 65, seed=1).bfloat16()
    out = linear(x, weight)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, linear(x, weight.float()), rtol=1e-5, atol=1e-5)
