"""The chunked prefill agrees with the recurrence, whatever the gates and lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_k3.kernels.kda import chunk_cpu, cpu
from tests.kernels.kda_cases import KDAInputs, extend, kda_inputs, one, oracle, states
from tests.kernels.spans import Spans, scaled_error, spans


def _agrees(inputs: KDAInputs, batch: Spans, bound: float = 1e-5, pool: torch.Tensor | None = None) -> None:
    """Outputs and states of both CPU prefills within `bound` of fp64, relative to scale."""
    pool = states(inputs, 10) if pool is None else pool
    want, want_pool = oracle(inputs, pool, batch)
    for function in (cpu.extend_chunk, cpu.extend_recurrent):
        after = pool.clone()
        got = extend(function, inputs, after, batch)
        assert scaled_error(got, want) < bound, function.__name__
        assert scaled_error(after, want_pool) < bound, function.__name__


@pytest.mark.parametrize("tokens", [1, 2, 3, 15, 16, 17, 63, 64, 65, 128, 1000])
def test_chunks_agree_with_the_recurrence(tokens):
    _agrees(kda_inputs(tokens), one(tokens))


@pytest.mark.parametrize("key_dim, value_dim", [(60, 100), (100, 60), (128, 128), (7, 1), (1, 5)])
def test_any_head_dims(key_dim, value_dim):
    _agrees(kda_inputs(150, key_dim=key_dim, value_dim=value_dim), one(150))


def test_one_token_beside_two_thousand():
    lengths = [1, 2000, 0, 65]
    _agrees(kda_inputs(sum(lengths), heads=1), spans(lengths, fresh=[False, True, False, False]))


def test_gates_at_the_bound_for_thousands_of_tokens():
    inputs = kda_inputs(4096, heads=1)
    _agrees(KDAInputs(inputs.q, inputs.k, inputs.v, torch.full_like(inputs.g, -5.0), inputs.beta), one(4096))


def test_half_of_the_channels_at_the_bound_and_half_not_decaying():
    inputs = kda_inputs(500)
    g = torch.where(torch.arange(32) % 2 == 0, -5.0, -1e-4).expand_as(inputs.g)
    _agrees(KDAInputs(inputs.q, inputs.k, inputs.v, g, inputs.beta), one(500))


@pytest.mark.parametrize("gate", [-1e30, -1000.0, -90.0, -30.0])
def test_unbounded_gates_stay_finite_and_right(gate):
    """Without a lower bound a gate can be anything; here a token in seven forgets everything."""
    inputs = kda_inputs(200)
    g = inputs.g.clone()
    g[::7] = gate
    g[100:, :, 3] = gate
    _agrees(KDAInputs(inputs.q, inputs.k, inputs.v, g, inputs.beta), one(200))


def test_correlated_keys_with_beta_near_one_and_weak_decay():
    """The triangular system is at its worst: every key repeats the ones before it."""
    inputs = kda_inputs(1000)
    k = inputs.k[:1] + 0.02 * inputs.k
    beta = 1 - 1e-3 * inputs.beta
    _agrees(KDAInputs(inputs.q, k, inputs.v, 1e-4 * inputs.g, beta), one(1000))


def test_no_decay_at_all():
    inputs = kda_inputs(300)
    _agrees(KDAInputs(inputs.q, inputs.k, inputs.v, torch.zeros_like(inputs.g), inputs.beta), one(300))


def test_values_of_zero_leave_a_decaying_state():
    inputs = kda_inputs(200)
    _agrees(KDAInputs(inputs.q, inputs.k, 0 * inputs.v, inputs.g, inputs.beta), one(200))


def test_keys_and_queries_of_zero_are_not_divided_by_zero():
    inputs = kda_inputs(80)
    q, k = inputs.q.clone(), inputs.k.clone()
    q[5], k[7] = 0, 0
    _agrees(KDAInputs(q, k, inputs.v, inputs.g, inputs.beta), one(80))


@pytest.mark.parametrize("cut", [1, 64, 100, 149])
def test_a_prompt_in_two_calls_agrees_with_one_call(cut):
    inputs = kda_inputs(150)
    pool = states(inputs, 2)
    want, want_pool = oracle(inputs, pool, one(150))
    head = extend(cpu.extend_chunk, inputs.rows(0, cut), pool, one(cut))
    tail = extend(cpu.extend_chunk, inputs.rows(cut, 150), pool, one(150 - cut))
    assert scaled_error(torch.cat([head, tail]), want) < 1e-5
    assert scaled_error(pool, want_pool) < 1e-5


def test_bf16_inputs_and_states():
    """One rounding of each output and of the stored state: half a unit in the last of 8 bits."""
    inputs = kda_inputs(150, dtype=torch.bfloat16)
    pool = states(inputs, 2, dtype=torch.bfloat16)
    want, want_pool = oracle(inputs, pool, one(150))
    got = extend(cpu.extend_chunk, inputs, pool, one(150))
    assert got.dtype == pool.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(pool.double(), want_pool, rtol=2**-8, atol=1e-6)


def test_more_requests_than_are_worked_on_together():
    lengths = [70, 3, 0, 130, 64, 1, 17, 66]
    inputs = kda_inputs(sum(lengths), heads=24, key_dim=8, value_dim=4)
    _agrees(inputs, spans(lengths))


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_random_batches(data: st.DataObject):
    lengths = data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=4))
    count = len(lengths)
    heads = data.draw(st.integers(1, 3), label="heads")
    key_dim = data.draw(st.integers(1, 40), label="key_dim")
    value_dim = data.draw(st.integers(1, 40), label="value_dim")
    tracks = [
        data.draw(st.sampled_from([(-1, -1), (-1, 5 + i), (data.draw(st.integers(0, n)), 5 + i)]))
        for i, n in enumerate(lengths)
    ]
    batch = spans(
        lengths,
        slots=[data.draw(st.sampled_from([-1, i + 1])) for i in range(count)],
        fresh=[data.draw(st.booleans()) for _ in lengths],
        tracks=tracks,
    )
    padding = data.draw(st.integers(0, 3), label="padding rows")
    _agrees(kda_inputs(batch.tokens + padding, heads, key_dim, value_dim), batch)


@pytest.mark.parametrize("bound", [-0.5, -1.5, -2.5, -5.0])
def test_matrix_products_meet_no_subnormal_numbers(bound: float) -> None:
    """They can be many times slower; what decays a little at every token passes through them on its way."""
    made = torch.Generator().manual_seed(1)
    tokens, heads, width = chunk_cpu.CHUNK, 2, 128

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    g = bound * (0.5 + 0.5 * torch.rand(tokens, heads, width, generator=made))
    rows = (normal(tokens, heads, width) for _ in range(3))
    q, k, v = (part.numpy() for part in rows)
    inputs = chunk_cpu._Inputs(q, k, v, g.numpy(), torch.rand(tokens, heads, generator=made).numpy())
    buffers = chunk_cpu._Buffers.allocate(heads, width, width)
    chunk_cpu._factor(inputs, width**-0.5, np.array([0]), np.array([tokens]), heads, buffers)
    smallest = torch.finfo(torch.float32).smallest_normal
    for name in ("from_state", "values", "tail", "total", "left", "right"):
        found = getattr(buffers, name).abs()
        assert not ((found > 0) & (found < smallest)).any(), name
    assert buffers.from_state.abs().max() > 1e-3
