"""Verify leaves records and no state; commit makes of them what plain decode would have made."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from sglang_k3.kernels.kda import block_cpu, cpu, reference
from sglang_k3.kernels.registry import Call, choose
from tests.kernels.invariance import same_bits, torch_threads
from tests.kernels.kda_cases import KDAInputs, decode, kda_inputs, states
from tests.kernels.spans import scaled_error

WIDTH = 8
"""Drafted tokens and the anchor: D."""
POOLS = pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
IMPLEMENTATIONS = pytest.mark.parametrize(
    "verify, commit",
    [
        (reference.verify, reference.commit),
        (cpu.verify, cpu.commit),
        (block_cpu.verify, block_cpu.commit),
    ],
    ids=["reference", "row by row", "block"],
)
POISON = -77.0


def banks(
    inputs: KDAInputs, rows: int, layers: int | None = None, ring: int = WIDTH
) -> tuple[torch.Tensor, ...]:
    """u, k, g of `rows` running requests, poisoned: nothing may be read that was not written."""
    heads, value_dim, key_dim = *inputs.v.shape[1:], inputs.k.shape[2]
    shape = (rows, ring, heads) if layers is None else (layers, rows, ring, heads)
    return (
        torch.full((*shape, value_dim), POISON),
        torch.full((*shape, key_dim), POISON, dtype=inputs.k.dtype),
        torch.full((*shape, key_dim), POISON),
    )


def run_verify(verify, inputs, pool, slots, lengths, rows, bank, starts=None, tails=None, folds=None):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    none = [0] * len(slots)
    pending = [torch.tensor(x) for x in (starts or none, tails or none, folds or [-1] * len(slots))]
    spans = torch.tensor(slots), cu_seqlens, torch.tensor(rows)
    return verify(*inputs.tensors, pool, *spans, *bank, *pending, inputs.scale)


def run_commit(commit, pool, slots, rows, bank, counts, tracks=None, starts=None, into=None):
    """One layer: the stacked operator on views with a leading 1."""
    offsets, targets = zip(*tracks, strict=True) if tracks else ([-1] * len(slots), [-1] * len(slots))
    commit(
        pool.unsqueeze(0),
        torch.tensor(slots),
        torch.tensor(into or slots),
        torch.tensor(rows),
        *(part.unsqueeze(0) for part in bank),
        torch.tensor(starts or [0] * len(slots)),
        torch.tensor(counts),
        torch.tensor(offsets),
        torch.tensor(targets),
    )


@pytest.mark.parametrize("exact, kernels", [(False, block_cpu), (True, cpu)])
def test_registry_gives_the_numba_kernels(exact, kernels):
    call = Call("cpu", torch.float32, exact)
    assert choose("kda.verify", call) is kernels.verify and choose("kda.commit", call) is kernels.commit
    assert choose("kda.verify", Call("cpu", torch.float64)) is reference.verify


@IMPLEMENTATIONS
@pytest.mark.parametrize("key_dim, value_dim", [(32, 24), (128, 128), (60, 33), (7, 1), (1, 5)])
def test_verify_and_commit_agree_with_the_fp64_recurrence(verify, commit, key_dim, value_dim):
    inputs = kda_inputs(WIDTH, key_dim=key_dim, value_dim=value_dim)
    pool = states(inputs, 4)
    want, want_pool = pool.double(), pool.double()
    double = inputs.map(torch.Tensor.double)
    outputs = [decode(reference.decode, double.rows(t, t + 1), want, torch.tensor([2])) for t in range(WIDTH)]
    for t in range(5):
        decode(reference.decode, double.rows(t, t + 1), want_pool, torch.tensor([2]))
    bank = banks(inputs, 3)
    got = run_verify(verify, inputs, pool, [2], [WIDTH], [1], bank)
    assert scaled_error(got, torch.cat(outputs)) < 2e-6
    run_commit(commit, pool, [2], [1], bank, [5])
    assert scaled_error(pool, want_pool) < 2e-6


@POOLS
def test_every_accepted_count_gives_the_bits_of_plain_decode(pool_dtype):
    """200 rounds on one running state, so that an error would pile up: outputs and states, bit for bit."""
    draw = torch.Generator().manual_seed(5)
    plain = states(kda_inputs(1, key_dim=20, value_dim=11), 3, dtype=pool_dtype)
    pool = plain.clone()
    seen = set()
    for round_ in range(200):
        inputs = kda_inputs(WIDTH, key_dim=20, value_dim=11, seed=round_)
        bank = banks(inputs, 2)
        count = int(torch.randint(0, WIDTH + 1, (), generator=draw))
        seen.add(count)
        got = run_verify(cpu.verify, inputs, pool, [1], [WIDTH], [1], bank)
        run_commit(cpu.commit, pool, [1], [1], bank, [count])
        for t in range(count):
            step = decode(cpu.decode, inputs.rows(t, t + 1), plain, torch.tensor([1]))
            assert same_bits(got[t : t + 1], step), f"round {round_}, token {t}"
        assert same_bits(pool, plain), f"round {round_}, {count} accepted"
    assert seen == set(range(WIDTH + 1))


@POOLS
def test_u_of_a_block_is_the_u_of_single_tokens(pool_dtype):
    inputs = kda_inputs(WIDTH, key_dim=36, value_dim=10)
    pool = states(inputs, 2, dtype=pool_dtype)
    block = banks(inputs, 1)
    run_verify(cpu.verify, inputs, pool, [1], [WIDTH], [0], block)
    for t in range(WIDTH):
        single = banks(inputs, 1)
        run_verify(cpu.verify, inputs.rows(t, t + 1), pool, [1], [1], [0], single)
        for part, alone in zip(block, single, strict=True):
            assert same_bits(part[0, t], alone[0, 0])
        run_commit(cpu.commit, pool, [1], [0], single, [1])


@IMPLEMENTATIONS
@POOLS
def test_verify_writes_no_state_and_no_other_request(verify, commit, pool_dtype):
    lengths, slots, rows = [3, 0, 8, 2], [4, 2, -1, 1], [3, 0, 2, 5]
    inputs = kda_inputs(sum(lengths) + 2)
    pool = states(inputs, 6, dtype=pool_dtype)
    before = pool.clone()
    bank = banks(inputs, 7)
    out = run_verify(verify, inputs, pool, slots, lengths, rows, bank)
    assert same_bits(pool, before)
    assert not out[3:11].any(), "a request without a slot"
    assert not out[13:].any(), "padding"
    assert out[:3].abs().min() > 0 and out[11:13].abs().min() > 0
    for part in bank:
        written = (part != POISON).flatten(2).all(-1)
        assert written.nonzero().tolist() == [[3, 0], [3, 1], [3, 2], [5, 0], [5, 1]]
        assert (part == POISON).flatten(2).all(-1).sum() == 7 * WIDTH - 5


@IMPLEMENTATIONS
@POOLS
@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_the_state_at_a_boundary_is_kept_at_every_offset(verify, commit, pool_dtype, count):
    inputs = kda_inputs(WIDTH, value_dim=10)
    start = states(inputs, 4, dtype=pool_dtype)
    for offset in range(-1, WIDTH + 1):
        pool, bank = start.clone(), banks(inputs, 1)
        run_verify(verify, inputs, pool, [1], [WIDTH], [0], bank)
        run_commit(commit, pool, [1], [0], bank, [count], [(offset, 3)])
        if offset < 0 or offset > count or count == 0:
            want = start[3]
        else:
            partly = start.clone()
            run_commit(commit, partly, [1], [0], bank, [offset])
            want = partly[1]
        assert same_bits(pool[3], want), f"offset {offset}"
        assert same_bits(pool[[0, 2]], start[[0, 2]])


@IMPLEMENTATIONS
@POOLS
@pytest.mark.parametrize("value_dim", [10, 24])
def test_a_state_may_go_on_in_another_slot_and_stay_as_it_was(verify, commit, pool_dtype, value_dim):
    counts, slots, into, rows = [5, 0, 8], [1, 2, 3], [4, 5, 3], [0, 1, 2]
    inputs = kda_inputs(WIDTH * 3, value_dim=value_dim)
    start = states(inputs, 7, dtype=pool_dtype)
    bank = banks(inputs, 3)
    run_verify(verify, inputs, start, slots, [WIDTH] * 3, rows, bank)
    there, here = start.clone(), start.clone()
    run_commit(commit, there, slots, rows, bank, counts, [(2, 6), (0, 0), (-1, -1)], into=into)
    run_commit(commit, here, slots, rows, bank, counts, [(2, 6), (0, 0), (-1, -1)])
    assert same_bits(there[[4, 3, 6]], here[[1, 3, 6]])
    assert not torch.equal(there[4], start[1])
    assert same_bits(there[[0, 1, 2, 5]], start[[0, 1, 2, 5]])


@IMPLEMENTATIONS
def test_a_commit_touches_its_slots_only(verify, commit):
    counts, slots, rows = [0, 3, 7, 1, 8], [5, 1, -1, 4, 2], [0, 4, 1, 2, 3]
    inputs = kda_inputs(WIDTH * len(slots))
    pool = states(inputs, 7)
    start, bank = pool.clone(), banks(inputs, 5)
    run_verify(verify, inputs, pool, slots, [WIDTH] * len(slots), rows, bank)
    run_commit(commit, pool, slots, rows, bank, counts)
    for n, (slot, count) in enumerate(zip(slots, counts, strict=True)):
        want = start.double()
        for t in range(n * WIDTH, n * WIDTH + count):
            decode(
                reference.decode, inputs.map(torch.Tensor.double).rows(t, t + 1), want, torch.tensor([slot])
            )
        if slot >= 0:
            assert scaled_error(pool[slot], want[slot]) < 1e-5
    assert same_bits(pool[[0, 3, 5, 6]], start[[0, 3, 5, 6]])


def test_all_layers_in_one_commit_have_the_bits_of_one_layer_each():
    layers, lengths = 3, [WIDTH, 5]
    inputs = [kda_inputs(sum(lengths), value_dim=13, seed=layer) for layer in range(layers)]
    pools = torch.stack([states(inputs[0], 4, seed=layer) for layer in range(layers)])
    bank = banks(inputs[0], 3, layers)
    for layer in range(layers):
        run_verify(
            cpu.verify, inputs[layer], pools[layer], [3, 1], lengths, [2, 1], [part[layer] for part in bank]
        )
    alone = pools.clone()
    arguments = [torch.tensor(x) for x in ([3, 1], [3, 1], [2, 1])]
    ends = [torch.tensor(x) for x in ([0, 0], [6, 5], [2, -1], [2, -1])]
    for threads in (1, 2):
        together = pools.clone()
        with torch_threads(threads):
            cpu.commit(together, *arguments, *bank, *ends)
        for layer in range(layers):
            one = pools[layer : layer + 1].clone()
            cpu.commit(one, *arguments, *(part[layer : layer + 1] for part in bank), *ends)
            alone[layer] = one[0]
        assert same_bits(together, alone)
        assert not torch.equal(together, pools)


def test_a_request_verifies_to_the_same_bits_alone_and_in_a_batch():
    lengths, slots = [8, 1, 4], [3, 1, 2]
    inputs = kda_inputs(sum(lengths), key_dim=40, value_dim=21)
    pool = states(inputs, 4)
    together = banks(inputs, 3)
    with torch_threads(2):
        out = run_verify(cpu.verify, inputs, pool, slots, lengths, [0, 1, 2], together)
    begin = 0
    for n, length in enumerate(lengths):
        alone = banks(inputs, 1)
        rows = inputs.rows(begin, begin + length)
        got = run_verify(cpu.verify, rows, pool, [slots[n]], [length], [0], alone)
        assert same_bits(got, out[begin : begin + length])
        assert all(same_bits(a[n, :length], b[0, :length]) for a, b in zip(together, alone, strict=True))
        begin += length


def test_bf16_activations_are_recorded_as_they_came():
    inputs = kda_inputs(WIDTH, dtype=torch.bfloat16)
    bank = banks(inputs, 1)
    run_verify(cpu.verify, inputs, states(inputs, 2), [1], [WIDTH], [0], bank)
    assert bank[1].dtype == torch.bfloat16 and same_bits(bank[1][0], inputs.k)
    assert same_bits(bank[2][0], inputs.g)


@IMPLEMENTATIONS
def test_an_empty_batch_is_nothing(verify, commit):
    inputs = kda_inputs(0)
    pool = states(inputs, 2)
    before, bank = pool.clone(), banks(inputs, 1)
    empty = torch.empty(0, dtype=torch.int64)
    spans = empty, torch.zeros(1, dtype=torch.int64), empty
    out = verify(*inputs.tensors, pool, *spans, *bank, empty, empty, empty, inputs.scale)
    commit(pool.unsqueeze(0), empty, empty, empty, *(part.unsqueeze(0) for part in bank), *[empty] * 4)
    assert out.shape == inputs.v.shape and same_bits(pool, before)


@pytest.mark.parametrize("gate", [-5.0, -1e-30, 0.0])
def test_gates_at_the_bound_stay_finite(gate):
    inputs = kda_inputs(WIDTH)
    inputs = KDAInputs(inputs.q, inputs.k, inputs.v, torch.full_like(inputs.g, gate), inputs.beta)
    pool = states(inputs, 2)
    stepped, bank = pool.clone(), banks(inputs, 1)
    for _ in range(20):
        run_verify(cpu.verify, inputs, pool, [1], [WIDTH], [0], bank)
        run_commit(cpu.commit, pool, [1], [0], bank, [WIDTH])
        for t in range(WIDTH):
            decode(cpu.decode, inputs.rows(t, t + 1), stepped, torch.tensor([1]))
    assert pool.isfinite().all() and same_bits(pool, stepped)


@dataclass
class Rings:
    """Three requests whose records, written by verifies of 5, 8 and 3 tokens, begin at `start` of a ring."""

    inputs: KDAInputs
    pool: torch.Tensor
    bank: tuple[torch.Tensor, ...]
    slots: tuple[int, ...] = (2, 4, 1)
    rows: tuple[int, ...] = (1, 0, 2)
    tails: tuple[int, ...] = (5, 0, 3)
    starts: tuple[int, ...] = ()

    @staticmethod
    def written(verify, start: int, ring: int, *, dtype=torch.float32, **dims) -> Rings:
        inputs = kda_inputs(40, **dims)
        bank = banks(inputs, 3, ring=ring)
        rings = Rings(inputs, states(inputs, 7, dtype=dtype), bank, starts=(start, start, start))
        run_verify(verify, inputs.rows(0, 8), rings.pool, [2, 4, 1], [5, 0, 3], [1, 0, 2], bank, rings.starts)
        return rings

    def go_on(self, verify, folds=(-1, -1, -1)) -> torch.Tensor:
        """Verify 8, 2 and 4 tokens more behind the tails."""
        more = self.inputs.rows(8, 22)
        rest = self.slots, (8, 2, 4), self.rows, self.bank, self.starts, self.tails, folds
        return run_verify(verify, more, self.pool, *rest)

    def settle(self, commit) -> None:
        run_commit(commit, self.pool, self.slots, self.rows, self.bank, self.tails, starts=self.starts)


RINGS = pytest.mark.parametrize("start, ring", [(0, 13), (6, 13), (30, 32)])


@IMPLEMENTATIONS
@POOLS
@RINGS
@pytest.mark.parametrize("key_dim, value_dim", [(32, 24), (60, 33), (7, 1)])
def test_a_tail_and_a_fold_are_a_commit_before_the_verify(
    verify, commit, pool_dtype, start, ring, key_dim, value_dim
):
    """The recurrence in fp64 over the tail, then over the tokens, whatever form carries the tail."""
    rings = Rings.written(verify, start, ring, dtype=pool_dtype, key_dim=key_dim, value_dim=value_dim)
    within = 3e-6 if pool_dtype == torch.float32 else 3e-2
    want_pool = rings.pool.double()
    double, outputs = rings.inputs.map(torch.Tensor.double), []
    for slot, old, new in ((2, (0, 5), (8, 16)), (4, (5, 5), (16, 18)), (1, (5, 8), (18, 22))):
        steps = [*range(*old), *range(*new)]
        state = want_pool.clone()
        out = [decode(reference.decode, double.rows(t, t + 1), state, torch.tensor([slot])) for t in steps]
        outputs += out[old[1] - old[0] :]
    for t, slot in [*((t, 2) for t in range(5)), *((t, 1) for t in range(5, 8))]:
        decode(reference.decode, double.rows(t, t + 1), want_pool, torch.tensor([slot]))
    before = rings.pool.clone()
    carried = rings.go_on(verify)
    assert same_bits(rings.pool, before)
    assert scaled_error(carried, torch.cat(outputs)) < within
    carried_bank = [part.clone() for part in rings.bank]
    folded = rings.go_on(verify, folds=(2, 6, 5))
    assert scaled_error(folded, torch.cat(outputs)) < within
    for slot, source in ((2, 2), (6, 4), (5, 1)):
        assert scaled_error(rings.pool[slot], want_pool[source]) < within
    assert same_bits(rings.pool[[0, 1, 3, 4]], before[[0, 1, 3, 4]]), "only the folded slots are written"
    for part, carried_part in zip(rings.bank, carried_bank, strict=True):
        assert scaled_error(part, carried_part) < within


@POOLS
@RINGS
def test_tail_fold_and_commit_have_the_same_bits_row_by_row(pool_dtype, start, ring):
    rings = Rings.written(cpu.verify, start, ring, dtype=pool_dtype)
    begin = rings.pool.clone()
    carried, carried_u = rings.go_on(cpu.verify), rings.bank[0].clone()
    folded = rings.go_on(cpu.verify, folds=(2, 4, 1))
    assert same_bits(folded, carried) and same_bits(rings.bank[0], carried_u)
    after = rings.pool.clone()
    rings.pool.copy_(begin)
    rings.settle(cpu.commit)
    assert same_bits(rings.pool, after)
    committed = run_verify(
        cpu.verify,
        rings.inputs.rows(8, 22),
        rings.pool,
        rings.slots,
        (8, 2, 4),
        rings.rows,
        rings.bank,
        starts=[(start + tail) % ring for tail in rings.tails],
    )
    assert same_bits(committed, carried) and same_bits(rings.bank[0], carried_u)


@pytest.mark.parametrize("gate", [-5.0, -1e-30, 0.0])
def test_a_long_tail_agrees_with_row_by_row_at_the_gates_bounds(gate):
    """63 recorded tokens, whose decays together are 0 in fp32, or nothing at all."""
    inputs = kda_inputs(71, key_dim=40)
    bounded = KDAInputs(inputs.q, inputs.k, inputs.v, torch.full_like(inputs.g, gate), inputs.beta)
    pool = states(inputs, 2)
    results = []
    for kernels in (cpu, block_cpu):
        bank, own = banks(inputs, 1, ring=72), pool.clone()
        for begin in range(0, 63, 7):
            rows = bounded.rows(begin, begin + 7)
            run_verify(kernels.verify, rows, own, [1], [7], [0], bank, [50], [begin])
        out = run_verify(kernels.verify, bounded.rows(63, 71), own, [1], [8], [0], bank, [50], [63])
        run_commit(kernels.commit, own, [1], [0], bank, [71], starts=[50])
        results.append((out, own))
    (exact, exact_pool), (block, block_pool) = results
    assert exact.abs().max() > 1e-3
    assert scaled_error(block, exact.double()) < 1e-5
    assert scaled_error(block_pool, exact_pool.double()) < 1e-5


@IMPLEMENTATIONS
def test_nan_in_a_gate_is_not_lost(verify, commit):
    """Whoever looks for broken requests looks at what comes out."""
    inputs = kda_inputs(WIDTH)
    inputs.g[3, 1, 5] = math.nan
    pool, bank = states(inputs, 2), banks(inputs, 1)
    out = run_verify(verify, inputs, pool, [1], [WIDTH], [0], bank)
    run_commit(commit, pool, [1], [0], bank, [WIDTH])
    assert out[3:, 1].isnan().all() and out[:3].isfinite().all() and out[:, 0].isfinite().all()
    assert pool[1, 1, :, 5].isnan().all() and pool[1, 0].isfinite().all()
