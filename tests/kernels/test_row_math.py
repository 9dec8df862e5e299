"""The scalar functions, dot products and bf16 conversions that exact kernels are made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit
from numba.core.errors import TypingError

from sglang_k3.kernels.row_math import LANES, array_of, dot, exp, narrow, sigmoid, softplus, widen
from tests.kernels.invariance import same_bits


@njit(error_model="numpy")
def _all_functions(x, e, s, p):
    for i in range(x.shape[0]):
        e[i] = exp(x[i])
        s[i] = sigmoid(x[i])
        p[i] = softplus(x[i])


@njit
def _round_trip(row, floats, back):
    widen(row, floats)
    narrow(floats, back)


@njit
def _narrow(values, row):
    narrow(values, row)


def _evaluate(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    e, s, p = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    _all_functions(x, e, s, p)
    return e, s, p


def _units(got: np.ndarray, want: np.ndarray) -> float:
    """The largest error in units of fp32's last place."""
    return float((np.abs(got - want) / np.spacing(want.astype(np.float32)).astype(np.float64)).max())


def test_functions_are_within_a_few_units_of_fp64():
    x = np.linspace(-87.3, 88.7, 400_001).astype(np.float32)
    wide = x.astype(np.float64)
    e, s, p = _evaluate(x)
    assert _units(e, np.exp(wide)) <= 1.5
    assert _units(s, 1 / (1 + np.exp(-wide))) <= 3
    assert _units(p, np.maximum(wide, 0) + np.log1p(np.exp(-np.abs(wide)))) <= 3


def test_special_values():
    x = np.array([0, -0.0, np.inf, -np.inf, -88, 89, np.nan], np.float32)
    e, s, p = _evaluate(x)
    np.testing.assert_array_equal(e, np.array([1, 1, np.inf, 0, 0, np.inf, np.nan], np.float32))
    np.testing.assert_allclose(s, np.array([0.5, 0.5, 1, 0, 0, 1, np.nan], np.float32), rtol=0, atol=1e-38)
    np.testing.assert_array_equal(p[2:], np.array([np.inf, 0, 0, 89, np.nan], np.float32))


def test_a_value_has_the_same_bits_wherever_it_stands():
    """A vectorised loop's body and its tail have to agree, unlike torch's."""
    x = np.linspace(-30, 30, 1001).astype(np.float32)
    whole = _evaluate(x)
    for start in range(1, 40):
        for width in (1, 7, 16, 33):
            for part, full in zip(_evaluate(x[start : start + width].copy()), whole, strict=True):
                np.testing.assert_array_equal(part, full[start : start + width])


def _fused(a, b, c):
    """a * b + c, rounded once: the product is exact in a wider format."""
    return (a.astype(np.longdouble) * b + c).astype(np.float32)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 60, 100, 128, 1000])
def test_dot_is_its_documented_order_of_sums(length):
    """Bit for bit: each product fused into its sum, and nothing reordered."""
    r = np.random.default_rng(length)
    a, b = r.standard_normal((2, length)).astype(np.float32)
    whole = length - length % LANES
    lanes = np.zeros(LANES, np.float32)
    for start in range(0, whole, LANES):
        lanes = _fused(a[start : start + LANES], b[start : start + LANES], lanes)
    while lanes.shape[0] > 1:
        lanes = lanes[: lanes.shape[0] // 2] + lanes[lanes.shape[0] // 2 :]
    total = lanes[0]
    for i in range(whole, length):
        total = _fused(a[i], b[i], total)
    assert np.float32(dot(a, b)).tobytes() == np.float32(total).tobytes()


def test_dot_of_strided_rows_is_refused():
    a = np.ones(32, np.float32)
    with pytest.raises(TypingError, match="contiguous"):
        dot(a[::2], a[::2])


def test_every_bf16_number_survives_and_fp32_rounds_as_torch_does():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    floats = np.empty(2**16, np.float32)
    back = torch.empty_like(every)
    _round_trip(array_of(every), floats, array_of(back))
    numbers = ~every.isnan()
    np.testing.assert_array_equal(floats, every.float().numpy())
    assert same_bits(back[numbers], every[numbers]) and back[~numbers].isnan().all()

    r = torch.Generator().manual_seed(0)
    values = torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=r).to(torch.int32).view(torch.float32)
    ties = (every[numbers].view(torch.int16).to(torch.int32) << 16 | 0x8000).view(torch.float32)
    for given in (values, ties):
        rounded = torch.empty(given.shape, dtype=torch.bfloat16)
        _narrow(given.numpy(), array_of(rounded))
        want = given.to(torch.bfloat16)
        number = ~given.isnan()
        assert same_bits(rounded[number], want[number]) and rounded[~number].isnan().all()
