"""MX formats: every code, every scale, the rounding rules, and compressed-tensors' own packing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

from sglang_k3.kernels.mx import cpu, reference
from tests.kernels.invariance import check_rows_keep_their_bits, same_bits

Dequantize = Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
FORMS = [reference.dequantize_mxfp4, cpu.dequantize_mxfp4]
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _every_code_and_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """256 rows, one a scale byte; each holds every byte of two codes: packed [256, 256], scale [256, 16]."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    return bytes_.repeat(256, 1), bytes_.unsqueeze(1).repeat(1, 16)


@pytest.mark.parametrize("dequantize", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_at_every_scale_is_exact(dequantize: Dequantize, dtype: torch.dtype) -> None:
    packed, scale = _every_code_and_scale()
    got = dequantize(packed, scale, dtype)
    codes = torch.tensor(
        [[VALUES[b & 15], VALUES[b >> 4]] for b in range(256)], dtype=torch.float64
    ).flatten()
    powers = torch.tensor([2.0 ** (s - 127) for s in range(255)], dtype=torch.float64)
    want = (powers.unsqueeze(1) * codes).to(dtype)  # 2 x 2^127 and more is infinity in both types
    assert same_bits(got[:255], want)
    assert torch.isnan(got[255]).all()
    assert want[0, 4].item() == 2.0**-127 and want[254, 4].item() == 2.0**127  # byte 2 holds codes 2, 0
    assert torch.isinf(want[254]).any()


@pytest.mark.parametrize("dequantize", FORMS)
def test_the_even_column_is_in_the_low_nibble(dequantize: Dequantize) -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 3] = 0x72
    out = dequantize(packed, torch.tensor([[128]], dtype=torch.uint8), torch.float32)
    assert out.nonzero().tolist() == [[0, 6], [0, 7]]
    assert out[0, 6:8].tolist() == [2.0, 12.0]


@pytest.mark.parametrize("dequantize", FORMS)
def test_no_rows_and_strided_rows(dequantize: Dequantize) -> None:
    assert dequantize(torch.zeros(0, 32).byte(), torch.zeros(0, 2).byte(), torch.bfloat16).shape == (0, 64)
    packed, scale = _every_code_and_scale()
    assert same_bits(
        dequantize(packed[::2, :32], scale[::2, :2], torch.float32),
        dequantize(packed, scale, torch.float32)[::2, :64],
    )


@pytest.mark.parametrize("dequantize", FORMS)
def test_unpacking_agrees_with_compressed_tensors(dequantize: Dequantize) -> None:
    packed, _ = _every_code_and_scale()
    ones = torch.full((256, 16), 127, dtype=torch.uint8)
    assert same_bits(dequantize(packed, ones, torch.bfloat16), unpack_fp4_from_uint8(packed, 256, 512))


@pytest.mark.parametrize("scale", [1e-35, 1e-3, 1.0, 1e30])
def test_quantising_agrees_with_compressed_tensors(scale: float) -> None:
    w = _random(64, 128) * torch.exp(_random(64, 128, seed=1)) * scale
    packed, byte = reference.quantize_mxfp4(w)
    blocks = w.unflatten(1, (4, 32))
    theirs = generate_mx_scales(blocks.abs().amax(-1)).clamp(0, 254).to(torch.uint8)
    assert torch.equal(byte, theirs)
    scaled = blocks.double() / torch.exp2(theirs.double() - 127).unsqueeze(-1)
    assert torch.equal(packed, pack_fp4_to_uint8(cast_to_fp4(scaled).flatten(1)))


def test_what_was_quantised_once_quantises_to_itself() -> None:
    packed = torch.randint(0, 256, (253, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed[:, ::16] = 0x86  # each block holds a 4 and a -0
    scale = torch.arange(253, dtype=torch.uint8).unsqueeze(1).repeat(1, 4)
    again, scale_again = reference.quantize_mxfp4(reference.dequantize_mxfp4(packed, scale, torch.float32))
    assert torch.equal(again, packed)
    assert torch.equal(scale_again, scale)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0.25, 0),
        (0.26, 0.5),
        (0.75, 1),
        (1.25, 1),
        (1.75, 2),
        (2.5, 2),
        (2.51, 3),
        (3.5, 4),
        (5, 4),
        (5.01, 6),
    ],
)
def test_ties_go_to_the_even_code(value: float, rounded: float) -> None:
    w = torch.zeros(1, 32)
    w[0, :3] = torch.tensor([6.0, value, -value])
    out = reference.dequantize_mxfp4(*reference.quantize_mxfp4(w), torch.float32)
    assert out[0, :3].tolist() == [6.0, rounded, -rounded]


@pytest.mark.parametrize(
    ("largest", "byte"), [(4.0, 127), (6.9, 127), (7.0, 128), (8.0, 128), (3.5, 127), (3.4, 126)]
)
def test_a_block_that_would_clip_takes_the_next_scale(largest: float, byte: int) -> None:
    w = torch.full((1, 32), 0.1)
    w[0, 9] = -largest
    assert reference.quantize_mxfp4(w)[1].tolist() == [[byte]]


def test_zero_and_tiny_blocks_have_the_smallest_scale() -> None:
    w = torch.zeros(2, 64)
    w[1] = 1e-40
    packed, scale = reference.quantize_mxfp4(w)
    assert scale.max() == 0
    assert packed[0].max() == 0
    assert reference.dequantize_mxfp4(packed, scale, torch.float32).abs().max() < 2.0**-127


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_weight_without_a_value_is_refused(bad: float) -> None:
    w = torch.zeros(2, 32)
    w[1, 5] = bad
    with pytest.raises(ValueError, match="not finite"):
        reference.quantize_mxfp4(w)


@pytest.mark.parametrize("quantize", [reference.quantize_mxfp4, reference.quantize_mxfp8])
def test_columns_that_fill_no_block_are_refused(quantize: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(ValueError, match="blocks of 32"):
        quantize(torch.zeros(2, 48))


@pytest.mark.parametrize(
    ("largest", "byte", "element"),
    [
        (448.0, 127, 448),
        (448.0001, 128, 224),
        (449.0, 128, 224),
        (224.0, 126, 448),
        (448 * 2.0**20, 147, 448),
        (1.0, 119, 256),
        (1e-10, 85, 448),
        (0.0, 85, 0),
    ],
)
def test_mxfp8_scale_is_the_smallest_that_fits(largest: float, byte: int, element: float) -> None:
    x = torch.zeros(1, 32)
    x[0, 7] = -largest
    q, scale = reference.quantize_mxfp8(x)
    assert scale.tolist() == [[byte]]
    assert q[0, 7].item() == -element
    assert q.float().abs().sum() == element


def test_mxfp8_never_saturates_and_never_wastes_half_the_range() -> None:
    x = _random(400, 64) * torch.exp2(torch.arange(400).float().unsqueeze(1) / 4 - 30)
    q, scale = reference.quantize_mxfp8(x)
    blocks, largest = q.float().unflatten(1, (2, 32)), x.unflatten(1, (2, 32)).abs().amax(-1).double()
    top = blocks.abs().amax(-1)
    assert top.max() <= 448 and top.min() >= 224
    assert torch.equal(scale.double() - 127, torch.ceil(torch.log2(largest / 448)))
    back = reference.dequantize_mxfp8(q, scale, torch.float32)
    # Three mantissa bits; below 2^-6 of the scale the step is fixed.
    step = torch.exp2(scale.float() - 127).repeat_interleave(32, dim=1)
    assert ((back - x).abs() <= torch.maximum(x.abs() * 2.0**-4, step * 2.0**-10)).all()


def test_mxfp8_rounds_to_even() -> None:
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([448.0, 17.0, 19.0, -17.0])  # the step at 16 is 2
    q, _ = reference.quantize_mxfp8(x)
    assert q[0, :4].tolist() == [448.0, 16.0, 20.0, -16.0]


def test_mxfp8_marks_a_block_without_values_and_no_other() -> None:
    x = _random(3, 96)
    x[0, 3], x[1, 40], x[2, 95] = math.nan, math.inf, -math.inf
    q, scale = reference.quantize_mxfp8(x)
    marked = torch.zeros(3, 3, dtype=torch.bool)
    marked[0, 0] = marked[1, 1] = marked[2, 2] = True
    assert torch.equal(scale == 255, marked)
    back = reference.dequantize_mxfp8(q, scale, torch.float32).unflatten(1, (3, 32))
    assert torch.equal(torch.isnan(back).all(-1), marked)
    assert torch.equal(torch.isnan(back).any(-1), marked)


@pytest.mark.parametrize("tokens", [0, 1, 7, 17])
def test_mxfp8_of_bf16_rows(tokens: int) -> None:
    x = _random(tokens, 64).bfloat16()
    q, scale = reference.quantize_mxfp8(x)
    assert (q.dtype, q.shape, scale.dtype, scale.shape) == (
        torch.float8_e4m3fn,
        (tokens, 64),
        torch.uint8,
        (tokens, 2),
    )
    back = reference.dequantize_mxfp8(q, scale, torch.bfloat16)
    torch.testing.assert_close(back, x, rtol=2**-4, atol=0.01)


def test_rows_keep_their_bits() -> None:
    x = _random(35, 96)
    packed, scale = reference.quantize_mxfp4(x)
    q, q_scale = reference.quantize_mxfp8(x)

    def compute(index: torch.Tensor) -> list[torch.Tensor]:
        mxfp8, mxfp8_scale = reference.quantize_mxfp8(x[index])
        return [
            *reference.quantize_mxfp4(x[index]),
            mxfp8.float(),
            mxfp8_scale,
            cpu.dequantize_mxfp4(packed[index], scale[index], torch.float32),
            reference.dequantize_mxfp4(packed[index], scale[index], torch.bfloat16),
            reference.dequantize_mxfp8(q[index], q_scale[index], torch.float32),
        ]

    check_rows_keep_their_bits(compute, 35)
