"""kda's Triton kernels against the oracle in fp64, on the inputs of the CPU's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_k3.kernels.kda import ascend_triton, ascend_triton_block, reference
from tests.kernels.invariance import same_bits
from tests.kernels.kda_cases import KDAInputs, decode, kda_inputs, states
from tests.kernels.spans import scaled_error
from tests.kernels.test_kda_records import WIDTH, banks, run_commit, run_verify
from tests.kernels.triton.recorder import recording

TOLERANCE = 2e-6
VERIFIES = pytest.mark.parametrize(
    "verify", [ascend_triton.verify, ascend_triton_block.verify], ids=["row by row", "products"]
)
ONE_STEP = 8e-3
"""Of bfloat16: the interpreter rounds towards zero, where a device rounds to the nearest."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_dim", [24, 40])
def test_decode_is_the_recurrence_and_touches_only_its_slots(dtype: torch.dtype, value_dim: int):
    inputs = kda_inputs(3, value_dim=value_dim, dtype=dtype)
    pool = states(inputs, 5)
    before, want_pool, slots = pool.clone(), pool.double(), torch.tensor([4, -1, 2])
    want = decode(reference.decode, inputs.map(torch.Tensor.double), want_pool, slots)
    with recording():
        got = decode(ascend_triton.decode, inputs, pool, slots)
    assert scaled_error(got, want) < (TOLERANCE if dtype == torch.float32 else ONE_STEP)
    assert scaled_error(pool, want_pool) < TOLERANCE
    assert not got[1].any() and torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]])


def test_decode_takes_columns_of_one_projection():
    """q, k and v as the convolution leaves them: columns of one tensor, which is not copied."""
    inputs = kda_inputs(2, value_dim=32)
    joined = torch.cat([part.flatten(1) for part in (inputs.q, inputs.k, inputs.v)], dim=1)
    q, k, v = (part.view(2, 2, 32) for part in joined.split(64, dim=1))
    pool, slots = states(inputs, 3), torch.tensor([1, 2])
    same = pool.clone()
    want = decode(ascend_triton.decode, inputs, pool, slots)
    got = ascend_triton.decode(q, k, v, inputs.g, inputs.beta, same, slots, inputs.scale)
    assert torch.equal(got, want) and torch.equal(same, pool)


@VERIFIES
@pytest.mark.parametrize("lengths", [[WIDTH, WIDTH], [1, 5, 8], [3, 0, 2]], ids=str)
def test_verify_of_ragged_drafts_leaves_records_and_no_state(verify: Callable, lengths: list[int]):
    inputs = kda_inputs(sum(lengths) + 2, value_dim=40)
    pool = states(inputs, 5)
    before = pool.clone()
    slots, rows = [2, -1, 4][: len(lengths)], [3, 1, 2][: len(lengths)]
    bank, want_bank = banks(inputs, 5), banks(inputs, 5)
    exact = inputs.map(torch.Tensor.double)
    want = run_verify(reference.verify, exact, pool.double(), slots, lengths, rows, want_bank)
    with recording():
        got = run_verify(verify, inputs, pool, slots, lengths, rows, bank)
    assert scaled_error(got, want) < TOLERANCE and torch.equal(pool, before)
    for ours, theirs in zip(bank, want_bank, strict=True):
        assert scaled_error(ours, theirs) < TOLERANCE


@VERIFIES
@pytest.mark.parametrize(
    "start, tail, fold, ring",
    [(5, 3, False, 16), (14, 8, True, 16), (2, 1, True, 16), (0, 0, True, 16), (40, 63, True, 72)],
)
def test_verify_behind_a_tail(verify: Callable, start: int, tail: int, fold: bool, ring: int):
    """The last: anchored, with all records since a state 64 tokens back."""
    first, second = kda_inputs(tail), kda_inputs(WIDTH, seed=3)
    pool = states(first, 4)
    bank, want_bank = banks(first, 3, ring=ring), banks(first, 3, ring=ring)
    for part in (bank, want_bank):
        run_verify(reference.verify, first, pool, [2], [tail], [1], part, starts=[start])
    pending = {"starts": [start], "tails": [tail], "folds": [3 if fold else -1]}
    want_pool = pool.double()
    exact = second.map(torch.Tensor.double)
    want = run_verify(reference.verify, exact, want_pool, [2], [WIDTH], [1], want_bank, **pending)
    spans = torch.tensor([2]), torch.tensor([0, WIDTH]), torch.tensor([1])
    numbers = [torch.tensor(value) for value in pending.values()]
    with recording():
        got = verify(*second.tensors, pool, *spans, *bank, *numbers, second.scale, width=WIDTH)
    assert scaled_error(got, want) < TOLERANCE and scaled_error(pool, want_pool) < TOLERANCE
    for ours, theirs in zip(bank, want_bank, strict=True):
        assert scaled_error(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("width", [1, 3, 12])
def test_a_block_of_any_width(width: int):
    inputs = kda_inputs(width, heads=1)
    pool = states(inputs, 3)
    bank, want_bank = (banks(inputs, 2, ring=width) for _ in range(2))
    want = run_verify(
        reference.verify, inputs.map(torch.Tensor.double), pool.double(), [2], [width], [1], want_bank
    )
    with recording():
        got = run_verify(ascend_triton_block.verify, inputs, pool, [2], [width], [1], bank)
    assert scaled_error(got, want) < TOLERANCE and scaled_error(bank[0], want_bank[0]) < TOLERANCE


@pytest.mark.parametrize("gate", [-1e30, -90.0, -5.0, 0.0])
def test_a_block_whose_gates_have_no_bound(gate: float):
    inputs = kda_inputs(WIDTH)
    g = inputs.g.clone()
    g[1::3], g[:, :, 5] = gate, gate
    inputs = KDAInputs(inputs.q, inputs.k, inputs.v, g, inputs.beta)
    pool = states(inputs, 3)
    bank, want_bank = banks(inputs, 2), banks(inputs, 2)
    want = run_verify(
        reference.verify, inputs.map(torch.Tensor.double), pool.double(), [2], [WIDTH], [1], want_bank
    )
    got = run_verify(ascend_triton_block.verify, inputs, pool, [2], [WIDTH], [1], bank)
    assert scaled_error(got, want) < TOLERANCE and scaled_error(bank[0], want_bank[0]) < TOLERANCE


def test_a_block_of_keys_that_repeat_with_beta_near_one():
    """The triangular system at its worst: a series in its powers would cancel."""
    inputs = kda_inputs(WIDTH)
    k = inputs.k[:1] + 0.02 * inputs.k
    inputs = KDAInputs(inputs.q, k, inputs.v, 1e-4 * inputs.g, 1 - 1e-3 * inputs.beta)
    pool = states(inputs, 3)
    bank, want_bank = banks(inputs, 2), banks(inputs, 2)
    want = run_verify(
        reference.verify, inputs.map(torch.Tensor.double), pool.double(), [2], [WIDTH], [1], want_bank
    )
    got = run_verify(ascend_triton_block.verify, inputs, pool, [2], [WIDTH], [1], bank)
    assert scaled_error(got, want) < TOLERANCE and scaled_error(bank[0], want_bank[0]) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_accepted_count_gives_the_bits_of_plain_decode(dtype: torch.dtype):
    inputs = kda_inputs(WIDTH)
    pool = states(inputs, 4, dtype=dtype)
    bank, plain = banks(inputs, 3), pool.clone()
    run_verify(ascend_triton.verify, inputs, pool, [2], [WIDTH], [1], bank)
    for count in range(WIDTH + 1):
        committed = pool.clone()
        run_commit(ascend_triton.commit, committed, [2], [1], bank, [count])
        assert same_bits(committed, plain), f"{count} accepted"
        if count < WIDTH:
            decode(ascend_triton.decode, inputs.rows(count, count + 1), plain, torch.tensor([2]))


@pytest.mark.parametrize("count", [0, 3, WIDTH])
def test_commit_keeps_a_checkpoint_at_any_offset(count: int):
    inputs = kda_inputs(WIDTH, value_dim=40)
    pool, bank = states(inputs, 5), banks(inputs, 3)
    run_verify(reference.verify, inputs, pool, [2], [WIDTH], [1], bank)
    for track in (-1, 0, 2, 3, WIDTH):
        ours, theirs = pool.clone(), pool.double()
        for commit, states_ in ((ascend_triton.commit, ours), (reference.commit, theirs)):
            run_commit(commit, states_, [2, -1], [1, 0], bank, [count, 3], [(track, 4), (1, 3)])
        assert scaled_error(ours, theirs) < TOLERANCE
        assert torch.equal(ours[[0, 1, 3]], pool[[0, 1, 3]])


def test_commit_of_several_layers_into_other_slots():
    inputs = kda_inputs(WIDTH)
    pools = torch.stack([states(inputs, 4, seed=seed) for seed in range(3)])
    draw = torch.Generator().manual_seed(9)
    bank = [-torch.rand(3, 3, *part.shape[1:], generator=draw) for part in banks(inputs, 1)]
    numbers = (
        [torch.tensor(x) for x in ([2, 1], [3, 1], [2, 0])],
        [torch.tensor(x) for x in ([6, 0], [5, 8], [-1, -1], [-1, -1])],
    )
    want = pools.double()
    reference.commit(want, *numbers[0], *bank, *numbers[1])
    with recording():
        ascend_triton.commit(pools, *numbers[0], *bank, *numbers[1], tracking=False)
    assert scaled_error(pools, want) < TOLERANCE


def test_a_key_size_that_is_no_tile_is_refused_by_name():
    inputs = kda_inputs(1, key_dim=20)
    with pytest.raises(ValueError, match="K = 20"):
        decode(ascend_triton.decode, inputs, states(inputs, 2), torch.tensor([1]))
