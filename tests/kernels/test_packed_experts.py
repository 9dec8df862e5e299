"""Packed experts decoded in registers: all codes and scales, both ways to multiply, bits beside others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_k3.kernels.moe import packed_cpu, reference
from sglang_k3.kernels.mx.reference import dequantize_mxfp4
from tests.kernels.invariance import same_bits

BETAS = (4.0, 25.0)


def codes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def split(x: torch.Tensor) -> np.ndarray:
    return packed_cpu._split(x)


def unsplit(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(1, (-1, 4, 8)).transpose(2, 3).flatten(1)


def test_split_form_can_be_undone() -> None:
    x = torch.randn(3, 96)
    assert torch.equal(unsplit(torch.from_numpy(split(x))), x)


def test_every_code_under_every_scale_is_decoded_as_the_reference_decodes_it() -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    out = np.empty((256, 512), np.float32)
    flat = packed.numpy().ravel(), scale.numpy().ravel()
    packed_cpu._unpack(0, 256, *flat, packed_cpu.SCALES, 0, 16, out)
    want = dequantize_mxfp4(packed, scale, torch.float32)
    torch.testing.assert_close(unsplit(torch.from_numpy(out)), want, rtol=0, atol=0, equal_nan=True)
    assert want.isfinite().sum() > 250 * 512 and want.unique().numel() > 1000


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (7, 64), (100, 96), (5000, 64)])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_product_by_tiles_is_the_product(
    rows: int, columns: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_cpu, "_TILE_BYTES", 1 << 14)
    packed, scale = codes(rows + 2, columns // 2), 127 + codes(rows + 2, columns // 32) % 3
    x = torch.randn(tokens, columns)
    flat = packed.numpy().ravel(), scale.numpy().ravel()
    got = packed_cpu.product(split(x), *flat, 2, rows)
    want = x.double() @ dequantize_mxfp4(packed, scale, torch.float32)[2:].double().T
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)


def experts(count: int, inner: int, width: int) -> tuple[torch.Tensor, ...]:
    def scales(rows: int, columns: int) -> torch.Tensor:
        return 124 + codes(count, rows, columns // 32, seed=3) % 4

    return (
        codes(count, 2 * inner, width // 2),
        scales(2 * inner, width),
        codes(count, width, inner // 2, seed=1),
        scales(width, inner),
    )


@pytest.mark.parametrize("fused_rows", [0, 10**6], ids=["by tile", "decoded in place"])
@pytest.mark.parametrize("betas", [BETAS, (4.0, None), (None, None)])
@pytest.mark.parametrize(
    ("tokens", "count", "top", "inner", "width"),
    [(1, 1, 1, 32, 32), (5, 3, 2, 96, 64), (17, 4, 3, 32, 160), (40, 16, 4, 64, 64)],
)
def test_both_ways_agree_with_the_reference(
    fused_rows: int,
    betas: tuple[float | None, float | None],
    tokens: int,
    count: int,
    top: int,
    inner: int,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_cpu, "FUSED_ROWS", fused_rows)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, width, generator=generator)
    ids = torch.rand(tokens, count, generator=generator).argsort(1)[:, :top].sort(1).values
    weights = torch.rand(tokens, top, generator=generator)
    matrices = experts(count, inner, width)
    got = packed_cpu.experts_mxfp4(x, ids, weights, *matrices, *betas)
    want = reference.experts_mxfp4(x.double(), ids, weights.double(), *matrices, *betas)
    assert want.abs().max() > 0.1
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_a_decoded_row_has_the_same_bits_alone_and_beside_others() -> None:
    x, matrices = torch.randn(11, 64), experts(2, 64, 64)
    ids, weights = torch.zeros(11, 1, dtype=torch.int64), torch.ones(11, 1)
    together = packed_cpu._split(x)
    assert together.shape == (11, 64)
    for count in (1, 3, 4, 5, 11):
        steps = packed_cpu.plan(ids[:count], weights[:count], 0, 2)
        parts = packed_cpu._Weights(*(part.numpy().reshape(-1) for part in matrices))
        out = torch.zeros(count, 64)
        packed_cpu._decoded_in_place(together[:count], steps, parts, packed_cpu._activation(*BETAS), 64, out)
        if count == 1:
            alone = out
        assert same_bits(out[:1], alone)


def test_bf16_rounds_once_at_the_end() -> None:
    x, matrices = torch.randn(3, 64).bfloat16(), experts(4, 32, 64)
    ids, weights = torch.tensor([[0, 1], [1, 3], [0, 3]]), torch.rand(3, 2)
    got = packed_cpu.experts_mxfp4(x, ids, weights, *matrices, *BETAS)
    want = reference.experts_mxfp4(x.double(), ids, weights.double(), *matrices, *BETAS)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-3)


def test_ids_of_other_ranks_are_left_out_of_the_plan() -> None:
    ids = torch.tensor([[3, 7, 9], [7, 8, -1]])
    steps = packed_cpu.plan(ids, torch.arange(6.0).view(2, 3), 7, 2)
    assert steps.experts.tolist() == [0, 1]
    assert steps.starts.tolist() == [0, 2, 3]
    assert steps.rows.tolist() == [0, 1, 1]
    assert steps.shares.tolist() == [1.0, 3.0, 4.0]
