"""A drafted block attends to its context and to itself."""

from __future__ import annotations

import pytest
import torch

from sglang_k3.kernels.block_attention import cpu, reference
from sglang_k3.kernels.registry import Call, choose
from tests.kernels.spans import scaled_error

BOTH = pytest.mark.parametrize("attend", [reference.block_attention, cpu.block_attention])
CAUSAL = pytest.mark.parametrize("causal", [False, True])


def _case(lengths, rows=7, heads=4, groups=2, width=16, dtype=torch.float32, cache_dtype=None, seed=0):
    r = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=r)

    requests, slots = len(lengths), sum(lengths) + 5
    longest = max([1, *lengths])
    table = torch.full((requests + 2, longest), -1, dtype=torch.int32)
    order = torch.randperm(slots, generator=r).int()
    begin = 0
    request_rows = torch.arange(requests).flip(0) + 1
    for n, length in enumerate(lengths):
        table[request_rows[n], :length] = order[begin : begin + length]
        begin += length
    cache = [normal(slots, groups, width).to(cache_dtype or dtype) for _ in range(2)]
    # What no position names must not be read: NaN would show.
    for part in cache:
        part[order[begin:].long()] = float("nan")
    own = [normal(requests, rows, groups, width).to(dtype) for _ in range(2)]
    q = normal(requests, rows, heads, width).to(dtype)
    return q, *own, *cache, table, request_rows, torch.tensor(lengths, dtype=torch.int64)


def _scaled(case, dtype):
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in case)


def test_registry_prefers_numba_and_leaves_odd_heads_to_the_reference():
    assert choose("block_attention", Call("cpu", torch.float32)) is cpu.block_attention
    assert choose("block_attention", Call("cpu", torch.float32, dims={"D": 12})) is reference.block_attention


@BOTH
@CAUSAL
def test_agrees_with_torch_attention_row_by_row(attend, causal):
    case = _case([5], heads=2, groups=2)
    q, k, v, k_cache, v_cache, table, rows, _ = case
    slots = table[rows[0], :5].long()
    keys, values = torch.cat([k_cache[slots], k[0]]), torch.cat([v_cache[slots], v[0]])
    mask = torch.ones(7, 12, dtype=torch.bool)
    if causal:
        mask[:, 5:] = torch.ones(7, 7, dtype=torch.bool).tril()
    want = torch.nn.functional.scaled_dot_product_attention(
        q[0].transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=mask, scale=0.3
    ).transpose(0, 1)
    assert scaled_error(attend(*case, 0.3, causal)[0], want) < 1e-5


@CAUSAL
@pytest.mark.parametrize(
    "lengths, rows, heads, groups, width",
    [
        ([0, 1, 63, 64, 65, 200], 7, 4, 2, 16),
        ([130], 1, 1, 1, 8),
        ([3, 2], 70, 2, 1, 64),
        ([17, 0, 9], 5, 6, 3, 40),
    ],
)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_numba_agrees_with_fp64(lengths, rows, heads, groups, width, causal, cache_dtype):
    case = _case(lengths, rows, heads, groups, width, cache_dtype=cache_dtype)
    want = reference.block_attention(*_scaled(case, torch.float64), width**-0.5, causal)
    got = cpu.block_attention(*case, width**-0.5, causal)
    assert scaled_error(got, want) < 3e-6


@BOTH
def test_large_scores_stay_finite(attend):
    q, k, v, *rest = _case([70], width=16)
    out = attend(100 * q, 100 * k, v, *rest, 1.0, False)
    assert out.isfinite().all()


@BOTH
def test_an_empty_batch_is_nothing(attend):
    q, k, v, k_cache, v_cache, table, rows, lengths = _case([4])
    out = attend(q[:0], k[:0], v[:0], k_cache, v_cache, table, rows[:0], lengths[:0], 1.0, False)
    assert out.shape == (0, 7, 4, 16)


@BOTH
def test_bf16_comes_back_as_bf16(attend):
    case = _case([20], dtype=torch.bfloat16)
    want = reference.block_attention(*_scaled(case, torch.float64), 0.25, False)
    got = attend(*case, 0.25, False)
    assert got.dtype == torch.bfloat16 and scaled_error(got, want) < 1e-2
