"""short_conv's Triton kernels against the oracle, and transformers' convolution."""

from __future__ import annotations

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as theirs

from sglang_k3.kernels.short_conv import ascend_triton, reference
from tests.kernels.spans import scaled_error, spans
from tests.kernels.triton.recorder import recording

DTYPES = pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@DTYPES
@pytest.mark.parametrize("channels", [6, 300])
def test_ragged_requests_with_padding(dtype: torch.dtype, tolerance: float, channels: int):
    x, weight = _random(14, channels).to(dtype), _random(channels, 4, seed=1)
    pool = _random(8, 3, channels, seed=2).to(dtype)
    batch = spans(
        [5, 1, 0, 2, 4],
        slots=[3, 1, 2, -1, 5],
        fresh=[False, True, True, False, False],
        tracks=[(2, 6), (1, 7), (0, 4), (1, 4), (-1, 2)],
    )
    want_pool = pool.clone()
    want = reference.extend(x, weight, want_pool, *batch.arguments)
    with recording():
        got = ascend_triton.extend(x, weight, pool, *batch.arguments)
    assert scaled_error(got, want) < tolerance and torch.equal(pool, want_pool)


def test_a_prompt_longer_than_a_chunk_goes_on_where_the_chunk_ends():
    x, weight, pool = _random(150, 5), _random(5, 4, seed=1), _random(4, 3, 5, seed=2)
    want_pool = pool.clone()
    batch = spans([70, 80], fresh=[True, False]).arguments
    want = reference.extend(x, weight, want_pool, *batch)
    assert scaled_error(ascend_triton.extend(x, weight, pool, *batch), want) < 1e-6
    assert torch.equal(pool, want_pool)


def test_a_fresh_prompt_is_transformers_convolution():
    x, weight = _random(9, 12), _random(12, 4, seed=1)
    want = theirs.causal_conv1d_fn(x.t().unsqueeze(0), weight, activation="silu")[0].t()
    got = ascend_triton.extend(x, weight, _random(2, 3, 12), *spans([9], fresh=[True]).arguments)
    assert scaled_error(got, want) < 1e-6


@DTYPES
def test_decode_touches_only_its_slots(dtype: torch.dtype, tolerance: float):
    x, weight, pool = _random(3, 300).to(dtype), _random(300, 4, seed=1), _random(6, 3, 300, seed=2).to(dtype)
    slots, want_pool = torch.tensor([4, -1, 2]), pool.clone()
    want = reference.decode(x, weight, want_pool, slots)
    with recording():
        got = ascend_triton.decode(x, weight, pool, slots)
    assert scaled_error(got, want) < tolerance and torch.equal(pool, want_pool)


def test_drafts_and_their_commit():
    x, weight = _random(10, 300), _random(300, 4, seed=1)
    pools = _random(2, 6, 3, 300, seed=2)
    slots, rows = torch.tensor([4, -1, 2]), torch.tensor([1, 2, 3])
    cu_seqlens = torch.tensor([0, 4, 6, 9])
    bank = torch.full((2, 5, 4, 300), -77.0)
    want_bank, want_pools, before = bank.clone(), pools.clone(), pools.clone()
    want = reference.verify(x, weight, want_pools[1], slots, cu_seqlens, rows, want_bank[1])
    with recording():
        got = ascend_triton.verify(x, weight, pools[1], slots, cu_seqlens, rows, bank[1])
    assert scaled_error(got, want) < 1e-6 and torch.equal(pools, before) and torch.equal(bank, want_bank)
    numbers = slots, rows, bank, torch.tensor([3, 2, 0]), torch.tensor([2, 1, -1]), torch.tensor([5, 1, 3])
    reference.commit(want_pools, *numbers[:4], want_pools, *numbers[4:])
    with recording():
        ascend_triton.commit(pools, *numbers[:4], pools, *numbers[4:])
    assert torch.equal(pools, want_pools)


def test_checkpoints_of_a_commit_go_to_other_pools():
    pools, others = _random(2, 4, 3, 6), _random(2, 3, 3, 6, seed=3)
    bank = _random(2, 2, 4, 6, seed=4)
    numbers = [torch.tensor([x]) for x in (2, 1, 4, 3, 2)]
    want, want_others = pools.clone(), others.clone()
    reference.commit(want, *numbers[:2], bank, numbers[2], want_others, *numbers[3:])
    ascend_triton.commit(pools, *numbers[:2], bank, numbers[2], others, *numbers[3:])
    assert torch.equal(pools, want) and torch.equal(others, want_others)


def test_another_width_is_refused_by_name():
    with pytest.raises(ValueError, match="over 3 tokens"):
        ascend_triton.decode(_random(1, 6), _random(6, 3), _random(2, 2, 6), torch.tensor([1]))
