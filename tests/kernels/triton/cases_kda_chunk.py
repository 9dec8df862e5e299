"""kda's chunked prefill in Triton against the recurrence in fp64, on the inputs of the CPU's tests."""

from __future__ import annotations

import pytest
import torch

from sglang_k3.kernels import registry
from sglang_k3.kernels.kda import ascend_triton_chunk as chunked
from sglang_k3.kernels.registry import Call
from tests.kernels.kda_cases import KDAInputs, extend, kda_inputs, one, oracle, states
from tests.kernels.spans import Spans, scaled_error, spans
from tests.kernels.triton.recorder import recording

TOLERANCE = 5e-6


def _agrees(inputs: KDAInputs, batch: Spans, pool: torch.Tensor | None = None) -> torch.Tensor:
    """Outputs and the pool behind them. Returns the outputs."""
    pool = states(inputs, 6) if pool is None else pool
    want, want_pool = oracle(inputs, pool, batch)
    with recording() as launches:
        got = extend(chunked.extend, inputs, pool, batch)
    assert [one.kernel for one in launches] == ["pairs", "solve", "walk"]
    assert scaled_error(got, want) < TOLERANCE
    assert scaled_error(pool, want_pool) < TOLERANCE
    return got


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 150])
def test_chunks_agree_with_the_recurrence(tokens: int):
    _agrees(kda_inputs(tokens), one(tokens))


@pytest.mark.parametrize("key_dim, value_dim", [(32, 40), (64, 24), (16, 100), (128, 128)])
def test_any_head_dims(key_dim: int, value_dim: int):
    _agrees(kda_inputs(70, heads=1, key_dim=key_dim, value_dim=value_dim), one(70))


def test_requests_of_any_length_side_by_side():
    lengths = [1, 70, 0, 64, 9]
    inputs = kda_inputs(sum(lengths) + 3)
    got = _agrees(inputs, spans(lengths, slots=[5, 2, 1, -1, 4], fresh=[False, True, True, False, True]))
    # The fourth request has no slot, and the last three rows are nobody's.
    assert not got[71:135].any() and not got[-3:].any() and got[135:144].any()


def test_a_prompt_in_two_calls_is_the_prompt_in_one():
    inputs = kda_inputs(150)
    pool = states(inputs, 2)
    want, want_pool = oracle(inputs, pool, one(150))
    parts = [(0, 100), (100, 150)]
    got = [extend(chunked.extend, inputs.rows(a, b), pool, one(b - a)) for a, b in parts]
    assert scaled_error(torch.cat(got), want) < TOLERANCE and scaled_error(pool, want_pool) < TOLERANCE


@pytest.mark.parametrize("offset", [0, 1, 63, 64, 100, 130])
def test_a_checkpoint_at_any_offset(offset: int):
    """In fp32, beside a request that keeps none and one whose offset has no slot."""
    lengths = [130, 5, 7]
    inputs = kda_inputs(sum(lengths))
    _agrees(inputs, spans(lengths, slots=[1, 2, 3], tracks=[(offset, 5), (-1, 4), (3, -1)]))


def test_a_fresh_request_without_a_token_leaves_zeros():
    inputs = kda_inputs(3)
    pool = states(inputs, 5)
    _agrees(inputs, spans([0, 3], slots=[1, 2], fresh=[True, False], tracks=[(0, 3), (0, 4)]), pool)
    assert not pool[1].any() and not pool[3].any()


def _with(inputs: KDAInputs, **changes: torch.Tensor) -> KDAInputs:
    return KDAInputs(**(vars(inputs) | changes))


@pytest.mark.parametrize("bound", [-5.0, -8.0, 0.0])
def test_gates_at_a_bound(bound: float):
    inputs = kda_inputs(130)
    _agrees(_with(inputs, g=torch.full_like(inputs.g, bound)), one(130))


def test_half_of_the_channels_at_the_bound_and_half_not_decaying():
    inputs = kda_inputs(130)
    g = torch.where(torch.arange(32) % 2 == 0, -5.0, -1e-4).expand_as(inputs.g)
    _agrees(_with(inputs, g=g.contiguous()), one(130))


def test_tokens_that_decay_in_turn_with_tokens_that_do_not():
    """The sums before a pair of tokens are large, and the sum between them is small."""
    inputs = kda_inputs(130)
    g = torch.where((torch.arange(130) // 24 % 2 == 0).view(-1, 1, 1), -5.0, -1e-3).expand_as(inputs.g)
    _agrees(_with(inputs, g=g.contiguous()), one(130))


def test_keys_that_repeat_with_beta_near_one_and_weak_decay():
    inputs = kda_inputs(130)
    k = inputs.k[:1] + 0.02 * inputs.k
    _agrees(_with(inputs, k=k, g=1e-4 * inputs.g, beta=1 - 1e-3 * inputs.beta), one(130))


def test_keys_and_queries_of_zero_are_not_divided_by_zero():
    inputs = kda_inputs(20)
    q, k = inputs.q.clone(), inputs.k.clone()
    q[5], k[7] = 0, 0
    _agrees(_with(inputs, q=q, k=k), one(20))


def test_bf16_rows_and_states():
    """One rounding of each output and of the stored state; the interpreter rounds towards zero."""
    inputs = kda_inputs(70, dtype=torch.bfloat16)
    pool = states(inputs, 2, dtype=torch.bfloat16)
    want, want_pool = oracle(inputs, pool, one(70))
    got = extend(chunked.extend, inputs, pool, one(70))
    assert got.dtype == pool.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(pool.double(), want_pool, rtol=2**-7, atol=1e-5)


def test_the_table_of_chunks_cuts_at_checkpoints():
    bounds = torch.tensor([0, 130, 130, 140, 145])
    slots = torch.tensor([3, 1, -1, 2])
    table = chunked.chunks(slots, bounds, torch.tensor([70, -1, 2, 9]), torch.tensor([5, 4, 6, -1]), 150)
    assert table.firsts.tolist() == [0, 2, 3, 3, 3, 3, 3, 4, 4]
    assert table.begins[:4].tolist() == [0, 64, 70, 140]
    assert table.counts.tolist() == [64, 6, 60, 5] + [0] * 6
    assert table.track_slots.tolist() == [5, -1, 6, -1]


def test_no_batch_has_more_chunks_than_the_table():
    for lengths in ([1] * 9, [64] * 3, [65, 63, 1], [0, 0]):
        count = len(lengths)
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        ends = torch.tensor(lengths).clamp(min=1) - 1
        slots = torch.arange(count)
        table = chunked.chunks(slots, bounds, ends, slots, int(bounds[-1]))
        assert int(table.firsts[-1]) <= len(table.begins)
        assert int(table.counts.sum()) == sum(lengths)


def test_a_call_that_does_not_fit_is_refused_with_the_reason():
    (entry,) = [one for one in registry.implementations("kda.extend") if one.name == "triton"]

    def reason(**dims: int) -> str:
        return entry.refusal(Call("npu", torch.bfloat16, dims=dims)) or ""

    assert reason(gate_bound=-5) == ""
    assert "V 192" in reason(gate_bound=-5, K=128, V=192)
    assert "without a bound" in reason() and "down to -20" in reason(gate_bound=-20)
    inputs = kda_inputs(2, key_dim=20)
    with pytest.raises(ValueError, match="K = 20"):
        extend(chunked.extend, inputs, states(inputs, 2), one(2))
    inputs = kda_inputs(2, value_dim=130)
    with pytest.raises(ValueError, match="V = 130"):
        extend(chunked.extend, inputs, states(inputs, 2), one(2))


def test_no_request_is_no_launch():
    inputs = kda_inputs(2)
    with recording() as launches:
        got = extend(chunked.extend, inputs, states(inputs, 2), spans([]))
    assert not launches and not got.any()
