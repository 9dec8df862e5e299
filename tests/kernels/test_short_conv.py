"""The short convolution and the windows it keeps between calls."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.kimi_linear import modeling_kimi_linear as theirs

from sglang_k3.kernels.registry import Call, choose
from sglang_k3.kernels.short_conv import cpu, reference
from tests.kernels.invariance import same_bits, torch_threads
from tests.kernels.spans import Spans, scaled_error, spans

EXTENDS = pytest.mark.parametrize("extend", [reference.extend, cpu.extend], ids=["reference", "numba"])
DECODES = pytest.mark.parametrize("decode", [reference.decode, cpu.decode], ids=["reference", "numba"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def _rows(tokens: int, channels: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _weight(channels: int, width: int = 4) -> torch.Tensor:
    return _rows(channels, width, seed=7)


def _windows(slots: int, channels: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return _rows(slots * 3, channels, dtype, seed=8).view(slots, 3, channels)


def _oracle(x: torch.Tensor, weight: torch.Tensor, pool: torch.Tensor, batch: Spans):
    exact_pool = pool.double()
    return reference.extend(x.double(), weight, exact_pool, *batch.arguments), exact_pool


def test_registry_gives_the_numba_kernel_in_both_modes():
    for exact in (False, True):
        assert choose("short_conv.extend", Call("cpu", torch.bfloat16, exact)) is cpu.extend
        assert choose("short_conv.decode", Call("cpu", torch.float32, exact)) is cpu.decode
    assert choose("short_conv.extend", Call("cpu", torch.float64)) is reference.extend


@EXTENDS
def test_fresh_prompt_is_transformers_convolution(extend):
    x, weight = _rows(9, 12), _weight(12)
    want = theirs.causal_conv1d_fn(x.t().unsqueeze(0), weight, activation="silu")[0].t()
    got = extend(x, weight, _windows(2, 12), *spans([9], fresh=[True]).arguments)
    assert scaled_error(got, want) < 1e-6


@DECODES
def test_decode_is_transformers_update(decode):
    x, weight, pool = _rows(2, 12), _weight(12), _windows(4, 12)
    theirs_window = pool[[3, 1]].transpose(1, 2).contiguous()
    want = theirs.causal_conv1d_update(x.unsqueeze(-1), theirs_window, weight, activation="silu")[..., 0]
    got = decode(x, weight, pool, torch.tensor([3, 1]))
    assert scaled_error(got, want) < 1e-6
    assert same_bits(pool[[3, 1]], theirs_window.transpose(1, 2).contiguous())


@EXTENDS
@DTYPES
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 70])
def test_window_holds_the_last_rows_of_history_and_prompt(extend, dtype, tokens):
    x, pool = _rows(tokens, 5, dtype), _windows(2, 5, dtype)
    history = torch.cat([pool[1], x])
    want, _ = _oracle(x, _weight(5), pool, spans([tokens]))
    got = extend(x, _weight(5), pool, *spans([tokens]).arguments)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert same_bits(pool[1], history[tokens:])


@pytest.mark.parametrize("channels", [1, 3, 1024, 1025, 2500])
def test_any_number_of_channels(channels):
    lengths = [3, 0, 40, 1]
    x, pool = _rows(44, channels), _windows(5, channels)
    want, want_pool = _oracle(x, _weight(channels), pool, spans(lengths))
    got = cpu.extend(x, _weight(channels), pool, *spans(lengths).arguments)
    assert scaled_error(got, want) < 1e-6
    assert torch.equal(pool.double(), want_pool)


@pytest.mark.parametrize("width", [2, 3])
def test_other_kernel_widths(width):
    x, pool = _rows(9, 6), _windows(3, 6)[:, : width - 1].contiguous()
    want, want_pool = _oracle(x, _weight(6, width), pool, spans([8, 1]))
    got = cpu.extend(x, _weight(6, width), pool, *spans([8, 1]).arguments)
    assert scaled_error(got, want) < 1e-6
    assert torch.equal(pool.double(), want_pool)


@DTYPES
@given(cuts=st.sets(st.integers(0, 20), max_size=6))
@settings(max_examples=20, deadline=None)
def test_any_split_gives_the_same_bits(dtype, cuts):
    x, weight, pool = _rows(20, 37, dtype), _weight(37), _windows(2, 37, dtype)
    split = pool.clone()
    whole = cpu.extend(x, weight, pool, *spans([20]).arguments)
    bounds = [0, *sorted(cuts), 20]
    parts = [cpu.extend(x[a:b], weight, split, *spans([b - a]).arguments) for a, b in pairwise(bounds)]
    assert same_bits(torch.cat(parts), whole)
    assert same_bits(split, pool)


@DTYPES
@pytest.mark.parametrize("threads", [1, 2])
def test_decode_and_prefill_have_the_same_bits_alone_and_in_a_batch(dtype, threads):
    channels = 1500
    x, weight, pool = _rows(6, channels, dtype), _weight(channels), _windows(8, channels, dtype)
    slots = torch.tensor([5, 2, 7, 0, 3, 6])
    stepped, alone_pool = pool.clone(), pool.clone()
    with torch_threads(threads):
        together = cpu.decode(x, weight, pool, slots)
    alone = [cpu.decode(x[i : i + 1], weight, alone_pool, slots[i : i + 1]) for i in range(6)]
    prefilled = cpu.extend(x, weight, stepped, *spans([1] * 6, slots=slots.tolist()).arguments)
    for other, other_pool in ((torch.cat(alone), alone_pool), (prefilled, stepped)):
        assert same_bits(other, together)
        assert same_bits(other_pool, pool)


@EXTENDS
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5])
def test_window_is_kept_at_every_track_offset(extend, fresh, tokens):
    """Short sequences too, where the kept window still reaches into the one before the call."""
    copies = tokens + 1
    x, start = _rows(tokens, 4), _windows(1, 4)
    pool = torch.cat([start.expand(copies, -1, -1), torch.full((copies, 3, 4), torch.nan)])
    batch = spans(
        [tokens] * copies,
        slots=range(copies),
        fresh=[fresh] * copies,
        tracks=[(offset, copies + offset) for offset in range(copies)],
    )
    extend(x.repeat(copies, 1), _weight(4), pool, *batch.arguments)
    history = torch.cat([torch.zeros_like(start[0]) if fresh else start[0], x])
    for offset in range(copies):
        assert same_bits(pool[copies + offset], history[offset : offset + 3]), f"offset {offset}"
        assert same_bits(pool[offset], history[tokens:]), f"final window with offset {offset}"


@EXTENDS
@DTYPES
def test_only_the_batchs_own_windows_are_read_and_written(extend, dtype):
    """Free slots, a fresh request's own and the track targets are NaN; padding rows too."""
    lengths = [4, 2, 3, 0]
    x = torch.cat([_rows(9, 5, dtype), torch.full((2, 5), torch.nan, dtype=dtype)])
    pool = _windows(9, 5, dtype)
    pool[[1, 2, 4, 6, 7, 8]] = torch.nan
    before = pool.clone()
    batch = spans(
        lengths,
        slots=[2, -1, 0, 3],
        fresh=[True, False, False, False],
        tracks=[(2, 6), (1, 7), (3, 8), (-1, 1)],
    )
    out = extend(x, _weight(5), pool, *batch.arguments)
    assert torch.equal(out[4:6], torch.zeros_like(out[4:6]))
    assert torch.equal(out[9:], torch.zeros_like(out[9:]))
    assert out.isfinite().all() and out[[0, 1, 2, 3, 6, 7, 8]].abs().min() > 0
    assert same_bits(pool[[1, 3, 4, 5, 7]], before[[1, 3, 4, 5, 7]])
    assert same_bits(pool[2], x[1:4]) and same_bits(pool[0], x[6:9]) and same_bits(pool[8], x[6:9])
    assert same_bits(pool[6], torch.cat([torch.zeros_like(x[:1]), x[:2]]))


@DECODES
def test_decode_of_a_padded_request_is_inert(decode):
    x, pool = _rows(3, 5), _windows(4, 5)
    pool[[1, 3]] = torch.nan
    before = pool.clone()
    out = decode(x, _weight(5), pool, torch.tensor([2, -1, 0]))
    assert torch.equal(out[1], torch.zeros(5)) and out[[0, 2]].abs().min() > 0
    assert same_bits(pool[[1, 3]], before[[1, 3]])
    assert same_bits(pool[2], torch.cat([before[2, 1:], x[:1]]))
    assert same_bits(pool[0], torch.cat([before[0, 1:], x[2:]]))


@EXTENDS
def test_fresh_request_without_tokens_clears_its_window(extend):
    pool = _windows(3, 5)
    before = pool.clone()
    extend(_rows(0, 5), _weight(5), pool, *spans([0], slots=[1], fresh=[True]).arguments)
    assert torch.equal(pool[1], torch.zeros(3, 5))
    assert same_bits(pool[[0, 2]], before[[0, 2]])


@EXTENDS
@DECODES
def test_no_requests_and_no_tokens(extend, decode):
    pool = _windows(2, 5)
    before = pool.clone()
    padding = extend(_rows(2, 5), _weight(5), pool, *spans([]).arguments)
    assert torch.equal(padding, torch.zeros(2, 5))
    assert decode(_rows(0, 5), _weight(5), pool, torch.zeros(0, dtype=torch.int64)).shape == (0, 5)
    assert same_bits(pool, before)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_random_batches_agree_with_fp64(data: st.DataObject):
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    channels = data.draw(st.integers(1, 20))
    batch = spans(
        lengths,
        slots=[data.draw(st.sampled_from([-1, i])) for i in range(len(lengths))],
        fresh=[data.draw(st.booleans()) for _ in lengths],
        tracks=[
            data.draw(st.sampled_from([(-1, -1), (data.draw(st.integers(0, n)), 5 + i)]))
            for i, n in enumerate(lengths)
        ],
    )
    x, pool = _rows(batch.tokens + 1, channels), _windows(10, channels)
    want, want_pool = _oracle(x, _weight(channels), pool, batch)
    got = cpu.extend(x, _weight(channels), pool, *batch.arguments)
    assert scaled_error(got, want) < 1e-6
    assert torch.equal(pool.double(), want_pool)


VERIFIES = pytest.mark.parametrize(
    "verify, commit",
    [(reference.verify, reference.commit), (cpu.verify, cpu.commit)],
    ids=["reference", "numba"],
)


@VERIFIES
@DTYPES
@pytest.mark.parametrize("channels", [12, 1030])
def test_verify_then_commit_is_extend_over_the_accepted_rows(verify, commit, dtype, channels):
    lengths, counts = [8, 0, 5, 8], [3, 0, 5, 0]
    slots, rows = torch.tensor([2, 4, 1, 3]), torch.tensor([1, 0, 3, 2])
    x, weight, pool = _rows(sum(lengths), channels, dtype), _weight(channels), _windows(5, channels, dtype)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    start, bank = pool.clone(), torch.full((4, 8, channels), -77.0, dtype=dtype)
    y = verify(x, weight, pool, slots, cu_seqlens, rows, bank)
    assert same_bits(pool, start)
    want = cpu.extend(x, weight, start.clone(), *spans(lengths, slots.tolist()).arguments)
    assert scaled_error(y, want) < (1e-6 if dtype == torch.float32 else 1e-2)
    nowhere = torch.tensor([-1] * 4)
    pools = pool.unsqueeze(0)
    commit(pools, slots, rows, bank.unsqueeze(0), torch.tensor(counts), pools, nowhere, nowhere.clone())
    accepted = torch.cat(
        [x[begin : begin + n] for begin, n in zip(cu_seqlens.tolist(), counts, strict=False)]
    )
    cpu.extend(accepted, weight, start, *spans(counts, slots.tolist()).arguments)
    assert same_bits(pool, start)


@VERIFIES
def test_commit_keeps_the_window_at_each_boundary(verify, commit):
    x, weight, start = _rows(8, 12), _weight(12), _windows(4, 12)
    bank = torch.empty(1, 8, 12)
    here = torch.tensor([1]), torch.tensor([0])
    verify(x, weight, start, here[0], torch.tensor([0, 8]), here[1], bank)
    for count in range(9):
        for offset in range(-1, 9):
            for apart in (False, True):
                pool, other = start.clone(), start.clone()
                into = other if apart else pool
                commit(
                    pool.unsqueeze(0),
                    *here,
                    bank.unsqueeze(0),
                    torch.tensor([count]),
                    into.unsqueeze(0),
                    torch.tensor([offset]),
                    torch.tensor([3]),
                )
                kept = count > 0 and 0 <= offset <= count
                want = torch.cat([start[1], x])[offset : offset + 3] if kept else start[3]
                assert same_bits(into[3], want), (count, offset)
                assert same_bits(pool[1], torch.cat([start[1], x])[count : count + 3])
                if apart:
                    assert same_bits(pool[3], start[3]) and same_bits(other[:3], start[:3])


@VERIFIES
def test_verify_without_a_slot_leaves_no_rows(verify, commit):
    x, pool, bank = _rows(4, 12), _windows(2, 12), torch.full((1, 4, 12), -77.0)
    y = verify(x, _weight(12), pool, torch.tensor([-1]), torch.tensor([0, 4]), torch.tensor([0]), bank)
    assert not y.any() and (bank == -77).all()
