"""Which rows of the state pool a KDA call reads and writes: its own, and nothing else."""

from __future__ import annotations

import pytest
import torch

from sglang_k3.kernels.kda import cpu
from tests.kernels.invariance import same_bits
from tests.kernels.kda_cases import (
    DECODES,
    EXTENDS,
    decode,
    extend,
    kda_inputs,
    one,
    oracle,
    states,
    token_by_token,
)
from tests.kernels.spans import scaled_error, spans

PREFILLS = pytest.mark.parametrize("prefill", EXTENDS.values(), ids=EXTENDS.keys())
DECODERS = pytest.mark.parametrize("decoder", DECODES.values(), ids=DECODES.keys())
POOLS = pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])


@PREFILLS
@POOLS
def test_padded_request_is_inert_and_its_neighbours_are_not(prefill, pool_dtype):
    lengths = [4, 70, 3]
    inputs = kda_inputs(77)
    pool = states(inputs, 5, dtype=pool_dtype)
    before = pool.clone()
    out = extend(
        prefill, inputs, pool, spans(lengths, slots=[2, -1, 0], tracks=[(-1, -1), (70, 4), (-1, -1)])
    )
    first, padded, last = out.split(lengths)
    assert torch.equal(padded, torch.zeros_like(padded))
    assert same_bits(pool[[1, 3, 4]], before[[1, 3, 4]])
    want, want_pool = oracle(inputs.rows(74, 77), before, spans([3], slots=[0]))
    tolerance = 1e-5 if pool_dtype == torch.float32 else 2**-7
    assert scaled_error(last, want) < tolerance
    assert scaled_error(pool[0], want_pool[0]) < tolerance
    assert first.abs().min() > 0


@DECODERS
@POOLS
def test_decode_touches_its_own_slots_only(decoder, pool_dtype):
    inputs = kda_inputs(4)
    pool = states(inputs, 7, dtype=pool_dtype)
    before = pool.clone()
    out = decode(decoder, inputs, pool, torch.tensor([5, -1, 0, 3]))
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert same_bits(pool[[1, 2, 4, 6]], before[[1, 2, 4, 6]])
    for row, slot in ((0, 5), (2, 0), (3, 3)):
        want, want_pool = oracle(inputs.rows(row, row + 1), before, spans([1], slots=[slot]))
        assert scaled_error(out[row], want[0]) < 1e-5
        assert scaled_error(pool[slot], want_pool[slot]) < (1e-5 if pool_dtype == torch.float32 else 2**-7)


@PREFILLS
@POOLS
def test_free_and_fresh_slots_are_never_read(prefill, pool_dtype):
    """Every slot that holds nothing yet is NaN: free ones, a fresh request's own, and a track target."""
    lengths = [70, 1, 5]
    inputs = kda_inputs(76)
    pool = states(inputs, 9, dtype=pool_dtype)
    pool[[0, 2, 4, 5, 6, 7, 8]] = torch.nan
    before = pool.clone()
    batch = spans(lengths, slots=[2, 1, 3], fresh=[True, False, False], tracks=[(64, 6), (-1, -1), (5, 7)])
    out = extend(prefill, inputs, pool, batch)
    assert out.isfinite().all()
    assert pool[[1, 2, 3, 6, 7]].isfinite().all()
    assert same_bits(pool[[0, 4, 5, 8]], before[[0, 4, 5, 8]])


@DECODERS
def test_decode_reads_no_free_slot(decoder):
    inputs = kda_inputs(3)
    pool = states(inputs, 6)
    pool[[0, 1, 3, 5]] = torch.nan
    before = pool.clone()
    out = decode(decoder, inputs, pool, torch.tensor([2, -1, 4]))
    assert out.isfinite().all() and pool[[2, 4]].isfinite().all()
    assert same_bits(pool[[0, 1, 3, 5]], before[[0, 1, 3, 5]])


@PREFILLS
def test_padding_rows_are_zero_and_never_read(prefill):
    inputs = kda_inputs(80)
    pool = states(inputs, 2)
    alone_pool = pool.clone()
    alone = extend(prefill, inputs.rows(0, 70), alone_pool, one(70))
    poisoned = inputs.map(lambda x: torch.cat([x[:70], torch.full_like(x[70:], torch.nan)]))
    out = extend(prefill, poisoned, pool, one(70))
    assert torch.equal(out[70:], torch.zeros_like(out[70:]))
    assert same_bits(out[:70], alone) and same_bits(pool, alone_pool)


@PREFILLS
@POOLS
def test_request_without_tokens_keeps_its_state_or_clears_it_when_fresh(prefill, pool_dtype):
    inputs = kda_inputs(0)
    pool = states(inputs, 5, dtype=pool_dtype)
    before = pool.clone()
    batch = spans([0, 0], slots=[1, 2], fresh=[False, True], tracks=[(0, 3), (0, 4)])
    out = extend(prefill, inputs, pool, batch)
    assert out.shape == (0, 2, 24)
    assert same_bits(pool[[0, 1]], before[[0, 1]]) and same_bits(pool[3], before[1])
    assert torch.equal(pool[[2, 4]], torch.zeros_like(pool[[2, 4]]))


@PREFILLS
def test_no_requests_at_all(prefill):
    inputs = kda_inputs(3)
    pool = states(inputs, 2)
    before = pool.clone()
    out = extend(prefill, inputs, pool, spans([]))
    assert torch.equal(out, torch.zeros_like(out)) and out.shape == (3, 2, 24)
    assert same_bits(pool, before)


@DECODERS
def test_decode_of_no_requests(decoder):
    inputs = kda_inputs(0)
    pool = states(inputs, 2)
    before = pool.clone()
    assert decode(decoder, inputs, pool, torch.tensor([], dtype=torch.int64)).shape == (0, 2, 24)
    assert same_bits(pool, before)


@PREFILLS
@pytest.mark.parametrize("fresh", [False, True])
def test_state_is_kept_at_every_track_offset(prefill, fresh):
    """The same 70 tokens 71 times, the state kept after 0, 1, .. 70 of them."""
    tokens = 70
    inputs = kda_inputs(tokens, heads=1, key_dim=16, value_dim=8)
    start = states(inputs, 1)
    stepped = torch.zeros_like(start) if fresh else start.clone()
    expected = [stepped[0].clone()]
    for t in range(tokens):
        token_by_token(inputs.rows(t, t + 1), stepped, slot=0)
        expected.append(stepped[0].clone())

    copies = tokens + 1
    batch = spans(
        [tokens] * copies,
        slots=range(copies),
        fresh=[fresh] * copies,
        tracks=[(offset, copies + offset) for offset in range(copies)],
    )
    pool = torch.cat([start.expand(copies, -1, -1, -1), torch.full((copies, *start.shape[1:]), torch.nan)])
    out = extend(prefill, inputs.map(lambda x: x.repeat(copies, *[1] * (x.dim() - 1))), pool, batch)
    for offset in range(copies):
        assert scaled_error(pool[copies + offset], expected[offset]) < 1e-5, f"offset {offset}"
        assert scaled_error(pool[offset], expected[-1]) < 1e-5, f"final state with offset {offset}"
        if prefill is cpu.extend_recurrent:
            assert same_bits(pool[copies + offset], expected[offset]), f"offset {offset}"
    assert scaled_error(out[:tokens], out[-tokens:]) < 1e-5


@PREFILLS
def test_track_slot_without_an_offset_or_an_offset_without_a_slot_keeps_nothing(prefill):
    inputs = kda_inputs(10)
    pool = states(inputs, 6)
    before = pool.clone()
    extend(prefill, inputs, pool, spans([5, 5], tracks=[(-1, 4), (3, -1)]))
    assert same_bits(pool[[0, 3, 4, 5]], before[[0, 3, 4, 5]])
    assert not torch.equal(pool[[1, 2]], before[[1, 2]])
