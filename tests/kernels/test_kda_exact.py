"""Exact mode: the recurrent prefill and decode are one arithmetic, whatever the batch and the split."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_k3.kernels.kda import cpu
from sglang_k3.kernels.native import narrow_vectors
from sglang_k3.kernels.registry import Call, choose, resolve
from tests.kernels.invariance import same_bits, torch_threads
from tests.kernels.kda_cases import (
    KDAInputs,
    decode,
    extend,
    kda_inputs,
    one,
    oracle,
    states,
    token_by_token,
)
from tests.kernels.spans import scaled_error, spans

POOLS = pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])


def test_registry_gives_the_recurrence_in_exact_mode_and_what_is_faster_otherwise():
    call = {"device": "cpu", "dtype": torch.bfloat16}
    assert choose("kda.extend", Call(**call, exact=True)) is cpu.extend_recurrent
    fast = cpu.extend_recurrent if narrow_vectors() else cpu.extend_chunk
    assert choose("kda.extend", Call(**call)) is fast
    assert choose("kda.decode", Call(**call, exact=True)) is cpu.decode
    entry, refused = resolve("kda.extend", Call("cpu", torch.float64))
    assert entry.name == "reference"
    here = [reason for _, reason in refused if "npu" not in reason]
    assert len(here) == 2 and all("float64" in reason for reason in here)


@pytest.mark.parametrize("tokens", [1, 2, 3, 63, 64, 65, 1000])
def test_recurrence_agrees_with_fp64(tokens):
    inputs = kda_inputs(tokens)
    pool = states(inputs, 3)
    want, want_pool = oracle(inputs, pool, one(tokens))
    got = extend(cpu.extend_recurrent, inputs, pool, one(tokens))
    assert scaled_error(got, want) < 2e-6
    assert scaled_error(pool, want_pool) < 2e-6


@pytest.mark.parametrize("key_dim, value_dim", [(60, 100), (100, 60), (128, 128), (7, 1), (1, 5)])
def test_recurrence_takes_any_head_dims(key_dim, value_dim):
    inputs = kda_inputs(20, key_dim=key_dim, value_dim=value_dim)
    pool = states(inputs, 3)
    want, want_pool = oracle(inputs, pool, one(20))
    got = extend(cpu.extend_recurrent, inputs, pool, one(20))
    assert scaled_error(got, want) < 2e-6
    assert scaled_error(pool, want_pool) < 2e-6


@POOLS
def test_prefill_is_decode_token_by_token(pool_dtype):
    inputs = kda_inputs(40, key_dim=60, value_dim=20)
    pool = states(inputs, 3, dtype=pool_dtype)
    stepped = pool.clone()
    got = extend(cpu.extend_recurrent, inputs, pool, one(40))
    assert same_bits(got, token_by_token(inputs, stepped, slot=1))
    assert same_bits(pool, stepped)
    assert not torch.equal(pool[1], states(inputs, 3, dtype=pool_dtype)[1])


@POOLS
@given(cuts=st.sets(st.integers(0, 50), max_size=5))
@settings(max_examples=15, deadline=None)
def test_any_split_of_a_prompt_gives_the_same_bits(pool_dtype, cuts):
    inputs = kda_inputs(50)
    pool = states(inputs, 2, dtype=pool_dtype)
    split = pool.clone()
    whole = extend(cpu.extend_recurrent, inputs, pool, one(50, fresh=True))
    bounds = [0, *sorted(cuts), 50]
    parts = [
        extend(cpu.extend_recurrent, inputs.rows(a, b), split, one(b - a, fresh=i == 0))
        for i, (a, b) in enumerate(pairwise(bounds))
    ]
    assert same_bits(torch.cat(parts), whole)
    assert same_bits(split, pool)


def _joined(parts: list[KDAInputs]) -> KDAInputs:
    return KDAInputs(*(torch.cat(tensors) for tensors in zip(*(p.tensors for p in parts), strict=True)))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_prompt_alone_and_in_a_batch_has_the_same_bits(threads):
    lengths = [17, 1, 0, 64, 5]
    parts = [kda_inputs(length, seed=i) for i, length in enumerate(lengths)]
    pool = states(parts[0], 8)
    alone_pool = pool.clone()
    with torch_threads(threads):
        together = extend(cpu.extend_recurrent, _joined(parts), pool, spans(lengths)).split(lengths)
    with torch_threads(1):
        for i, part in enumerate(parts):
            alone = extend(cpu.extend_recurrent, part, alone_pool, spans([lengths[i]], slots=[i + 1]))
            assert same_bits(alone, together[i]), f"request {i}"
    assert same_bits(pool, alone_pool)


@POOLS
def test_decode_has_the_same_bits_alone_in_a_batch_and_in_another_order(pool_dtype):
    inputs = kda_inputs(9, key_dim=100, value_dim=33)
    pool = states(inputs, 12, dtype=pool_dtype)
    slots = torch.tensor([4, 11, 1, 7, 2, 9, 3, 10, 5])
    order = torch.tensor([8, 3, 0, 5, 1, 7, 2, 6, 4])
    alone_pool, shuffled_pool = pool.clone(), pool.clone()
    with torch_threads(2):
        together = decode(cpu.decode, inputs, pool, slots)
        shuffled = decode(cpu.decode, inputs.map(lambda x: x[order]), shuffled_pool, slots[order])
    alone = [
        decode(cpu.decode, inputs.rows(i, i + 1), alone_pool, slots[i : i + 1]) for i in range(len(slots))
    ]
    assert same_bits(torch.cat(alone), together)
    assert same_bits(shuffled, together[order])
    assert same_bits(alone_pool, pool) and same_bits(shuffled_pool, pool)


def test_strided_inputs_have_the_same_bits_as_contiguous_ones():
    """The layer passes q, k and v as slices of one tensor."""
    inputs = kda_inputs(6, key_dim=16, value_dim=16)
    pool = states(inputs, 2)
    packed = torch.cat([inputs.q, inputs.k, inputs.v], -1)
    q, k, v = packed.split(16, -1)
    assert not q.is_contiguous()
    strided_pool = pool.clone()
    want = extend(cpu.extend_recurrent, inputs, pool, one(6))
    got = extend(cpu.extend_recurrent, KDAInputs(q, k, v, inputs.g, inputs.beta), strided_pool, one(6))
    assert same_bits(got, want) and same_bits(strided_pool, pool)


def test_bf16_inputs_are_computed_in_fp32_and_rounded_once():
    inputs = kda_inputs(30, dtype=torch.bfloat16)
    pool = states(inputs, 2)
    wide_pool = pool.clone()
    got = extend(cpu.extend_recurrent, inputs, pool, one(30))
    wide = extend(cpu.extend_recurrent, inputs.map(torch.Tensor.float), wide_pool, one(30))
    assert got.dtype == torch.bfloat16
    assert same_bits(got, wide.to(torch.bfloat16))
    assert same_bits(pool, wide_pool)


def test_bf16_state_is_rounded_after_every_token():
    inputs = kda_inputs(12)
    pool = states(inputs, 2, dtype=torch.bfloat16)
    wide = pool.float()
    got = extend(cpu.extend_recurrent, inputs, pool, one(12))
    for t in range(12):
        out = decode(cpu.decode, inputs.rows(t, t + 1), wide, torch.tensor([1]))
        assert same_bits(out[0], got[t]), f"token {t}"
        wide = wide.to(torch.bfloat16).float()
    assert same_bits(pool, wide.to(torch.bfloat16))


def test_a_pool_that_is_not_contiguous_is_refused():
    inputs = kda_inputs(1)
    pool = states(inputs, 4)[::2]
    with pytest.raises(ValueError, match="contiguous"):
        decode(cpu.decode, inputs, pool, torch.tensor([1]))
