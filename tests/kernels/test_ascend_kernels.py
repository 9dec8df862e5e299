"""The torch forms that serve an Ascend NPU, on CPU tensors: against the oracles, in fp64 where it counts.

What needs torch_npu runs in tests/npu (make test-npu).
"""

from __future__ import annotations

import pytest
import torch

from sglang_k3.kernels.ascend import has_mx, present, put, request_of_row
from sglang_k3.kernels.block_attention import ascend as block_ascend
from sglang_k3.kernels.block_attention import reference as block_reference
from sglang_k3.kernels.kda import ascend, ascend_chunk, reference
from sglang_k3.kernels.linear import ascend as linear_ascend
from sglang_k3.kernels.linear import reference as linear_reference
from sglang_k3.kernels.mla import ascend as mla_ascend
from sglang_k3.kernels.mla import ascend_fused as mla_fused
from sglang_k3.kernels.mla import reference as mla_reference
from sglang_k3.kernels.registry import Call, NoImplementation, choose, implementations, resolve
from sglang_k3.kernels.short_conv import ascend as conv_ascend
from sglang_k3.kernels.short_conv import reference as conv_reference
from tests.kernels.kda_cases import extend, kda_inputs, oracle, states
from tests.kernels.spans import scaled_error, spans
from tests.kernels.test_kda_records import WIDTH, banks, run_commit, run_verify

TOLERANCE = 2e-5


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- shared pieces -----------------------------------------------------------------------------------------


def test_missing_slot_is_written_nowhere():
    pool = _random(4, 3)
    before = pool.clone()
    put(pool, torch.tensor([-1, 2, -1]), torch.ones(3, 3))
    assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]]) and torch.equal(pool[2], torch.ones(3))
    assert present(torch.tensor([-1, 2]))[0].tolist() == [False, True]


def test_rows_know_their_request_and_place():
    request, place, padding = request_of_row(torch.tensor([0, 3, 3, 5]), 7)
    assert request.tolist()[:5] == [0, 0, 0, 2, 2] and place.tolist()[:5] == [0, 1, 2, 0, 1]
    assert padding.tolist() == [False] * 5 + [True] * 2


@pytest.mark.parametrize("name, mx", [("Ascend950PR_9579", True), ("Ascend910_9391", False), ("", False)])
def test_only_the_950_computes_mx(name: str, mx: bool):
    assert has_mx(name) is mx


# --- the registry ------------------------------------------------------------------------------------------


def test_an_npu_gets_no_cpu_kernel_and_no_loop_over_requests():
    for operator in (
        "kda.decode",
        "kda.verify",
        "kda.commit",
        "kda.extend",
        "short_conv.verify",
        "moe.route",
    ):
        chosen, refused = resolve(operator, Call("npu", torch.bfloat16))
        assert chosen.device == "npu" and chosen.name != "reference"
        assert all(reason for _, reason in refused)


def test_mx_experts_are_refused_on_other_chips_by_name():
    chosen, refused = resolve("moe.experts_mxfp4", Call("npu", torch.bfloat16))
    assert chosen.name == "reference"  # no NPU here, so no 950 either
    assert any("MXFP4 is a format of the Ascend 950 series" in reason for _, reason in refused)


def test_the_activation_without_betas_is_never_taken():
    (entry,) = [one for one in implementations("activation.gated") if "situ_and_mul" in one.name]
    assert "beta" in (entry.refusal(Call("npu", torch.bfloat16)) or "")
    with pytest.raises(RuntimeError, match="beta"):
        entry.function(torch.ones(1, 4), 4.0, 25.0)


@pytest.mark.parametrize(
    "operator, name, dims, reasons",
    [
        (
            "activation.gated",
            "sgl_kernel_npu situ",
            {},
            ("sgl_kernel_npu, which is not installed", "float32"),
        ),
        ("kda.gate", "sgl_kernel_npu fused_kda_gate_npu", {}, ("sgl_kernel_npu, which is not", "float32")),
        (
            "short_conv.decode",
            "sgl_kernel_npu causal_conv1d",
            {},
            ("sgl_kernel_npu, which is not", "float32"),
        ),
        (
            "kda.commit",
            "CANN commit_recurrent_kda_replayssm, u and k in fp16",
            {},
            ("Ascend 950", "Ascend 950"),
        ),
        ("kda.commit", "CANN commit_recurrent_kda_replayssm, u and k in fp16", {"V": 96}, ("V 128", "V 128")),
        ("mla.paged_attention", "CANN flash_mla_with_kvcache", {}, ("columns apart", "columns apart")),
        ("mla.paged_attention", "CANN flash_mla_with_kvcache", {"joined": 1}, ("Ascend 950", "Ascend 950")),
    ],
)
def test_packages_that_are_not_there_are_refused_by_name(operator, name, dims, reasons):
    (entry,) = [one for one in implementations(operator) if one.name == name]
    for dtype, reason in zip((torch.bfloat16, torch.float32), reasons, strict=True):
        assert reason in (entry.refusal(Call("npu", dtype, dims=dims)) or "")


def test_quantised_rows_are_for_half_precision_and_whole_pairs_of_blocks():
    (entry,) = [one for one in implementations("moe.experts_mxfp4") if "mx_quant" in one.name]
    assert "too coarse" in (entry.refusal(Call("npu", torch.float32)) or "")
    assert "width 96" in (entry.refusal(Call("npu", torch.bfloat16, dims={"width": 96})) or "")


def test_exact_mode_has_no_npu_kernels():
    with pytest.raises(NoImplementation):
        choose("kda.decode", Call("npu", torch.float32, exact=True))


# --- short convolution -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution_of_ragged_requests_with_padding(dtype: torch.dtype):
    x, weight = _random(14, 6).to(dtype), _random(6, 4, seed=1)
    pool = _random(8, 3, 6, seed=2).to(dtype)
    batch = spans(
        [5, 1, 2, 4],
        slots=[3, 1, -1, 5],
        fresh=[False, True, False, False],
        tracks=[(2, 6), (1, 7), (1, 4), (-1, 2)],
    )
    want_pool = pool.clone()
    want = conv_reference.extend(x, weight, want_pool, *batch.arguments)
    got = conv_ascend.extend(x, weight, pool, *batch.arguments)
    assert scaled_error(got, want) < (1e-6 if dtype == torch.float32 else 1e-2)
    assert torch.equal(pool, want_pool)


def test_convolution_steps_touch_only_their_slots():
    x, weight, pool = _random(3, 6), _random(6, 4, seed=1), _random(6, 3, 6, seed=2)
    slots = torch.tensor([4, -1, 2])
    want_pool = pool.clone()
    want = conv_reference.decode(x, weight, want_pool, slots)
    assert scaled_error(conv_ascend.decode(x, weight, pool, slots), want) < 1e-6
    assert torch.equal(pool, want_pool)


def test_convolution_of_drafts_and_their_commit():
    x, weight = _random(9, 6), _random(6, 4, seed=1)
    pools = _random(2, 6, 3, 6, seed=2)
    slots, rows = torch.tensor([4, -1, 2]), torch.tensor([1, 2, 3])
    cu_seqlens = torch.tensor([0, 4, 6, 9])
    bank = torch.full((2, 5, 4, 6), float("nan"))
    want_bank, want_pools, before = bank.clone(), pools.clone(), pools.clone()
    want = conv_reference.verify(x, weight, want_pools[1], slots, cu_seqlens, rows, want_bank[1])
    got = conv_ascend.verify(x, weight, pools[1], slots, cu_seqlens, rows, bank[1])
    assert scaled_error(got, want) < 1e-6 and torch.equal(pools, before)
    assert torch.equal(bank[1, 1:].nan_to_num(7), want_bank[1, 1:].nan_to_num(7))
    bank.nan_to_num_(3.0)
    commit = slots, rows, bank, torch.tensor([3, 2, 0]), torch.tensor([2, 1, -1]), torch.tensor([5, 1, 3])
    conv_reference.commit(want_pools, *commit[:4], want_pools, *commit[4:])
    conv_ascend.commit(pools, *commit[:4], pools, *commit[4:])
    assert torch.equal(pools, want_pools)


# --- KDA ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths", [[1], [16], [17], [64, 3, 33], [0, 5, 16, 0, 31], [100]], ids=lambda value: str(value)
)
def test_prefill_in_chunks_is_the_recurrence(lengths: list[int]):
    inputs = kda_inputs(sum(lengths))
    pool = states(inputs, 12)
    tracks = [(length * 2 // 3, 11 - n) for n, length in enumerate(lengths)]
    batch = spans(lengths, fresh=[n % 2 == 1 for n in range(len(lengths))], tracks=tracks)
    want, want_pool = oracle(inputs, pool, batch)
    got = extend(ascend_chunk.extend, inputs, pool, batch)
    assert scaled_error(got, want) < TOLERANCE and scaled_error(pool, want_pool) < TOLERANCE


@pytest.mark.parametrize("offset", range(36))
def test_a_checkpoint_at_any_offset_is_the_state_there(offset: int):
    inputs = kda_inputs(35)
    pool = states(inputs, 4)
    batch = spans([35], tracks=[(offset, 3)])
    _, want_pool = oracle(inputs, pool, batch)
    extend(ascend_chunk.extend, inputs, pool, batch)
    assert scaled_error(pool[3], want_pool[3]) < TOLERANCE and scaled_error(pool, want_pool) < TOLERANCE


def test_prefill_leaves_padding_and_missing_slots_alone():
    inputs = kda_inputs(20)
    pool = states(inputs, 5)
    before = pool.clone()
    batch = spans([9, 6], slots=[-1, 2], tracks=[(3, 4), (-1, 1)])
    got = extend(ascend_chunk.extend, inputs, pool, batch)
    assert not got[:9].any() and not got[15:].any() and got[9:15].any()
    assert torch.equal(pool[[0, 1, 3, 4]], before[[0, 1, 3, 4]]) and not torch.equal(pool[2], before[2])


def test_prefill_of_one_repeated_key_stays_accurate():
    inputs = kda_inputs(48)
    same = inputs.k[:1].expand_as(inputs.k)
    inputs = type(inputs)(inputs.q, same.contiguous(), inputs.v, inputs.g * 1e-3, inputs.beta * 0 + 0.999)
    pool = states(inputs, 2)
    want, want_pool = oracle(inputs, pool, spans([48]))
    got = extend(ascend_chunk.extend, inputs, pool, spans([48]))
    assert scaled_error(got, want) < TOLERANCE and scaled_error(pool, want_pool) < TOLERANCE


def test_prefill_with_unbounded_gates_does_not_overflow():
    inputs = kda_inputs(40)
    inputs = type(inputs)(inputs.q, inputs.k, inputs.v, inputs.g * 60, inputs.beta)
    pool = states(inputs, 2)
    want, want_pool = oracle(inputs, pool, spans([40]))
    got = extend(ascend_chunk.extend, inputs, pool, spans([40]))
    assert scaled_error(got, want) < TOLERANCE and scaled_error(pool, want_pool) < TOLERANCE


def test_decode_is_the_recurrence_and_touches_only_its_slots():
    inputs = kda_inputs(3)
    pool = states(inputs, 5)
    slots = torch.tensor([4, -1, 2])
    want_pool = pool.double()
    want = reference.decode(*inputs.map(torch.Tensor.double).tensors, want_pool, slots, inputs.scale)
    got = ascend.decode(*inputs.tensors, pool, slots, inputs.scale)
    assert scaled_error(got, want) < TOLERANCE and scaled_error(pool, want_pool) < TOLERANCE
    assert torch.equal(pool[[0, 1, 3]].double(), want_pool[[0, 1, 3]])


@pytest.mark.parametrize("lengths", [[WIDTH, WIDTH], [1, 5, 8], [3, 0, 2]], ids=str)
def test_verify_of_ragged_drafts_leaves_records_and_no_state(lengths: list[int]):
    inputs = kda_inputs(sum(lengths) + 2)
    pool = states(inputs, 5)
    before = pool.clone()
    slots, rows = [2, -1, 4][: len(lengths)], [3, 1, 2][: len(lengths)]
    bank, want_bank = banks(inputs, 5), banks(inputs, 5)
    exact = inputs.map(torch.Tensor.double)
    want = run_verify(reference.verify, exact, pool.double(), slots, lengths, rows, want_bank)
    got = run_verify(ascend.verify, inputs, pool, slots, lengths, rows, bank)
    assert scaled_error(got, want) < TOLERANCE and torch.equal(pool, before)
    for ours, theirs in zip(bank, want_bank, strict=True):
        assert scaled_error(ours[1:], theirs[1:]) < TOLERANCE


@pytest.mark.parametrize("start, tail, fold", [(0, 0, False), (5, 3, False), (14, 8, True), (2, 1, True)])
def test_verify_behind_a_tail(start: int, tail: int, fold: bool):
    ring = 2 * WIDTH
    first, second = kda_inputs(tail or 1), kda_inputs(WIDTH, seed=3)
    pool = states(first, 4)
    bank, want_bank = banks(first, 3, ring=ring), banks(first, 3, ring=ring)
    for part in (bank, want_bank):
        if tail:
            run_verify(reference.verify, first, pool, [2], [tail], [1], part, starts=[start])
    pending = {"starts": [start], "tails": [tail], "folds": [2 if fold else -1]}
    want_pool = pool.double()
    exact = second.map(torch.Tensor.double)
    want = run_verify(reference.verify, exact, want_pool, [2], [WIDTH], [1], want_bank, **pending)
    cu_seqlens, here = torch.tensor([0, WIDTH]), torch.tensor([1])
    spans_ = torch.tensor([2]), cu_seqlens, here
    numbers = [torch.tensor(value) for value in pending.values()]
    got = ascend.verify(*second.tensors, pool, *spans_, *bank, *numbers, second.scale, width=WIDTH)
    assert scaled_error(got, want) < TOLERANCE and scaled_error(pool, want_pool) < TOLERANCE
    for ours, theirs in zip(bank, want_bank, strict=True):
        assert scaled_error(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("count", range(WIDTH + 1))
def test_commit_is_so_many_steps_of_decode(count: int):
    inputs = kda_inputs(WIDTH)
    pool = states(inputs, 5)
    bank = banks(inputs, 3)
    run_verify(reference.verify, inputs, pool, [2], [WIDTH], [1], bank)
    for track in range(-1, WIDTH + 1):
        ours, theirs = pool.clone(), pool.double()
        run_commit(ascend.commit, ours, [2, -1], [1, 0], bank, [count, 3], [(track, 4), (1, 3)])
        run_commit(reference.commit, theirs, [2, -1], [1, 0], bank, [count, 3], [(track, 4), (1, 3)])
        assert scaled_error(ours, theirs) < TOLERANCE
        assert torch.equal(ours[[0, 1, 3]], pool[[0, 1, 3]])


def test_commit_into_another_slot_leaves_the_first_as_it_was():
    inputs = kda_inputs(WIDTH)
    pool = states(inputs, 5)
    bank = banks(inputs, 3)
    run_verify(reference.verify, inputs, pool, [2], [WIDTH], [1], bank)
    ours, theirs = pool.clone(), pool.double()
    run_commit(ascend.commit, ours, [2], [1], bank, [5], into=[3])
    run_commit(reference.commit, theirs, [2], [1], bank, [5], into=[3])
    assert scaled_error(ours, theirs) < TOLERANCE and torch.equal(ours[2], pool[2])


def test_commit_takes_layers_in_groups(monkeypatch: pytest.MonkeyPatch):
    inputs = kda_inputs(WIDTH)
    pools = torch.stack([states(inputs, 4, seed=seed) for seed in range(5)])
    bank = tuple(_random(5, 3, *part.shape[1:], seed=9).abs().neg() for part in banks(inputs, 1))
    arguments = [torch.tensor(x) for x in ([2], [2], [1])], [torch.tensor(x) for x in ([0], [5], [3], [1])]
    want = pools.clone()
    reference.commit(want, *arguments[0], *bank, *arguments[1])
    monkeypatch.setattr(ascend, "_COMMIT_BYTES", pools[0, 0].numel() * 4 * 2)
    ascend.commit(pools, *arguments[0], *bank, *arguments[1])
    assert scaled_error(pools, want) < TOLERANCE


# --- attention, products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [7, 2048])
def test_latent_attention_over_a_cache_in_two_parts(block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mla_ascend, "_KEYS", block)
    latent, rope, heads, width = 16, 8, 3, 4
    cache = _random(60, latent + rope)
    cache[50:] = float("nan")
    table = torch.stack([torch.randperm(50, generator=torch.Generator().manual_seed(n)) for n in range(3)])
    rows, prefix = torch.tensor([2, 0]), torch.tensor([17, 0])
    table[2, 21:], table[0, 2:] = 55, 55
    q = _random(7, heads, latent + rope, seed=4)
    batch = table, rows, torch.tensor([0, 4, 6]), prefix, 0.2, latent
    want = mla_reference.paged_attention(q, cache, *batch)
    parts = cache[:, :latent], cache[:, latent:]
    got = mla_ascend.paged_attention(q, parts, *batch, reach=24, width=width)
    assert scaled_error(got, want) < 1e-5 and not got[6:].any()


@pytest.mark.parametrize("causal", [False, True])
def test_block_attention_over_contexts_of_any_length(causal: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(block_ascend, "_KEYS", 6)
    q, k, v = _random(3, 5, 4, 8), _random(3, 5, 2, 8, seed=1), _random(3, 5, 2, 8, seed=2)
    caches = [_random(40, 2, 8, seed=seed) for seed in (3, 4)]
    for cache in caches:
        cache[30:] = float("nan")
    table = torch.randint(0, 30, (4, 20), generator=torch.Generator().manual_seed(5))
    table[:, 13:] = 35
    arguments = q, k, v, *caches, table, torch.tensor([3, 1, 2]), torch.tensor([13, 0, 6]), 0.3, causal
    got = block_ascend.block_attention(*arguments)
    assert scaled_error(got, block_reference.block_attention(*arguments)) < 1e-5


def test_linear_maps():
    x, weight = _random(5, 8), _random(6, 8, seed=1)
    assert scaled_error(linear_ascend.linear(x, weight), linear_reference.linear(x, weight)) < 1e-6
    x, weight = _random(5, 3, 8), _random(3, 4, 8, seed=1)
    got, want = (module.linear_batched(x, weight) for module in (linear_ascend, linear_reference))
    assert got.shape == want.shape and scaled_error(got, want) < 1e-6


@pytest.mark.parametrize("heads, padded", [(6, 8), (8, 8), (12, 16), (96, 128)])
def test_fused_attention_pads_its_heads(heads: int, padded: int):
    assert mla_fused.padded_heads(heads) == padded
    fits = Call("npu", torch.bfloat16, dims={"heads": heads, "latent": 512, "rope": 64, "page": 128})
    assert mla_fused.fused_supports(fits) is None
    assert "page" in (mla_fused.fused_supports(Call("npu", torch.bfloat16, dims={"page": 16})) or "")
    assert "float32" in (mla_fused.fused_supports(Call("npu", torch.float32)) or "")
