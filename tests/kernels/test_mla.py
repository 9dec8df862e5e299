"""Paged latent attention: torch's attention over the same rows, causal edges, pages, bits in exact mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from sglang_k3.kernels.mla import cpu, reference
from tests.kernels.invariance import same_bits, torch_threads

Attention = Callable[..., torch.Tensor]
FORMS = [reference.paged_attention, cpu.paged_attention, cpu.paged_attention_rows]
LATENT, ROPE = 33, 7
SCALE = 0.2


@dataclass(frozen=True)
class Batch:
    """The arguments of one call, and each request's slots in order of position."""

    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor
    cu_seqlens: torch.Tensor
    prefix_lens: torch.Tensor
    slots: tuple[torch.Tensor, ...]

    def run(self, attention: Attention) -> torch.Tensor:
        return attention(
            self.q, self.cache, self.table, self.rows, self.cu_seqlens, self.prefix_lens, SCALE, LATENT
        )

    def take(self, request: int, first: int, last: int) -> Batch:
        """New rows first .. last - 1 of one request as a batch of their own."""
        start = int(self.cu_seqlens[request])
        return replace(
            self,
            q=self.q[start + first : start + last],
            rows=self.rows[request : request + 1],
            cu_seqlens=torch.tensor([0, last - first]),
            prefix_lens=self.prefix_lens[request : request + 1] + first,
        )


def _batch(
    lengths: Sequence[tuple[int, int]], heads: int = 3, padding: int = 0, spread: float = 1.0, seed: int = 0
) -> Batch:
    """Requests given as (prefix, new rows). Their slots are scattered over the cache; the other cache rows
    are NaN, and so is the slot that the table names past each request's end."""
    generator = torch.Generator().manual_seed(seed)
    totals = [prefix + new for prefix, new in lengths]
    order = torch.randperm(2 * sum(totals) + 5, generator=generator)
    cache = torch.full((len(order), LATENT + ROPE), math.nan)
    table = order[-1].repeat(len(lengths) + 2, max(totals, default=0) + 4)
    rows = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    slots = order[: sum(totals)].split(totals)
    for row, own in zip(rows.tolist(), slots, strict=True):
        table[row, : len(own)] = own
        cache[own] = torch.randn(len(own), LATENT + ROPE, generator=generator)
    new = torch.tensor([new for _, new in lengths], dtype=torch.int64)
    q = torch.randn(int(new.sum()) + padding, heads, LATENT + ROPE, generator=generator) * spread
    cu_seqlens = F.pad(new.cumsum(0), (1, 0))
    prefix_lens = torch.tensor([prefix for prefix, _ in lengths], dtype=torch.int64)
    return Batch(q, cache, table, rows, cu_seqlens, prefix_lens, slots)


def _torch_attention(batch: Batch) -> torch.Tensor:
    """The same by torch's attention in fp64, request by request."""
    parts = []
    for n, slots in enumerate(batch.slots):
        start, end = batch.cu_seqlens[n : n + 2].tolist()
        keys = batch.cache[slots].double().unsqueeze(0).expand(batch.q.shape[1], -1, -1)
        seen = torch.ones(end - start, len(slots), dtype=torch.bool).tril(len(slots) - (end - start))
        q = batch.q[start:end].double().transpose(0, 1)
        out = F.scaled_dot_product_attention(q, keys, keys[..., :LATENT], attn_mask=seen, scale=SCALE)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block sizes of the fast form small enough that a test crosses many."""
    monkeypatch.setattr(cpu, "KEYS", 16)
    monkeypatch.setattr(cpu, "QUERIES", 21)


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("heads", [1, 3, 17])
@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 1)],
        [(0, 17)],
        [(5, 1)],
        [(31, 1), (32, 1), (33, 1), (0, 1), (100, 1)],  # decode
        [(0, 100), (64, 7), (9, 0), (0, 0), (40, 16)],  # extend beside requests without rows
        [(0, 0), (0, 33), (63, 8)],
    ],
)
def test_agrees_with_torchs_attention(
    attention: Attention, heads: int, lengths: list[tuple[int, int]], small_blocks: None
) -> None:
    batch = _batch(lengths, heads)
    torch.testing.assert_close(batch.run(attention).double(), _torch_attention(batch), rtol=1e-5, atol=1e-6)


def test_agrees_with_torchs_attention_in_blocks_of_the_real_size() -> None:
    batch = _batch([(1100, 3), (0, 700)], heads=4)
    want = _torch_attention(batch)
    for attention in FORMS:
        torch.testing.assert_close(batch.run(attention).double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", FORMS)
def test_sharp_and_flat_scores(attention: Attention, small_blocks: None) -> None:
    for spread in (1e-20, 30.0, 300.0, 1e20):
        batch = _batch([(50, 20), (0, 40)], spread=spread)
        # Scores reach a thousand at 300 and carry their rounding into the shares; at 1e20 one row wins.
        tolerance = 2e-3 if spread == 300.0 else 1e-4
        torch.testing.assert_close(
            batch.run(attention).double(), _torch_attention(batch), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("attention", FORMS)
def test_the_first_row_sees_itself_alone(attention: Attention) -> None:
    batch = _batch([(0, 5)])
    first = batch.cache[batch.slots[0][0], :LATENT].expand(3, LATENT)
    torch.testing.assert_close(batch.run(attention)[0], first, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("attention", FORMS)
def test_a_row_sees_itself_and_nothing_later(attention: Attention, small_blocks: None) -> None:
    batch = _batch([(13, 20)])
    before = batch.run(attention)
    for row in (0, 3, 18):
        changed = batch.cache.clone()
        changed[batch.slots[0][13 + row]] *= -3
        after = replace(batch, cache=changed).run(attention)
        assert torch.equal(after[:row], before[:row])
        assert (after[row:] != before[row:]).flatten(1).any(1).all()


@pytest.mark.parametrize("attention", FORMS)
def test_the_rope_part_scores_and_is_no_value(attention: Attention) -> None:
    batch = _batch([(9, 4)])
    before = batch.run(attention)
    assert before.shape == (4, 3, LATENT)
    changed = batch.cache.clone()
    changed[:, LATENT:] += 5.0 * torch.randn(len(changed), ROPE, generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(replace(batch, cache=changed).run(attention), before, atol=1e-3)
    blind = replace(batch, q=torch.cat([batch.q[..., :LATENT], torch.zeros(4, 3, ROPE)], dim=-1))
    torch.testing.assert_close(replace(blind, cache=changed).run(attention), blind.run(attention))


@pytest.mark.parametrize("attention", FORMS)
def test_padding_rows_are_zero_and_not_computed(attention: Attention) -> None:
    batch = _batch([(4, 3), (0, 2)], padding=6)
    batch.q[5:] = math.nan
    out = batch.run(attention)
    assert torch.isfinite(out[:5]).all() and (out[:5] != 0).all()
    assert same_bits(out[5:], torch.zeros(6, 3, LATENT))


@pytest.mark.parametrize("attention", FORMS)
def test_nothing_to_do(attention: Attention) -> None:
    assert _batch([]).run(attention).shape == (0, 3, LATENT)
    assert _batch([(7, 0), (0, 0)]).run(attention).shape == (0, 3, LATENT)
    assert same_bits(_batch([], padding=2).run(attention), torch.zeros(2, 3, LATENT))


@pytest.mark.parametrize("attention", FORMS)
def test_int32_tables_strided_queries_and_a_cache_inside_a_wider_buffer(attention: Attention) -> None:
    batch = _batch([(20, 9), (0, 5)])
    wide = F.pad(batch.cache, (0, 11), value=math.nan)[:, : LATENT + ROPE]
    q = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    table = F.pad(batch.table, (0, 3))[:, : batch.table.shape[1]].int()
    torch.testing.assert_close(
        replace(batch, cache=wide, q=q, table=table).run(attention), batch.run(attention)
    )


def test_the_row_form_refuses_a_cache_with_split_rows() -> None:
    batch = _batch([(0, 3)])
    split = batch.cache.T.contiguous().T
    with pytest.raises(ValueError, match="contiguous"):
        replace(batch, cache=split).run(cpu.paged_attention_rows)


@pytest.mark.parametrize("attention", FORMS[:2])
def test_bf16_is_summed_wide_and_rounded_once(attention: Attention) -> None:
    batch = _batch([(60, 5), (0, 9)])
    batch = replace(batch, q=batch.q.bfloat16(), cache=batch.cache.bfloat16())
    out = batch.run(attention)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), _torch_attention(batch), rtol=2**-8, atol=1e-5)


def test_exact_rows_are_the_same_in_any_chunking_and_phase() -> None:
    batch = _batch([(3, 70)], heads=9)
    whole = batch.run(cpu.paged_attention_rows)
    for chunk in (1, 7, 16, 32, 64):
        parts = [
            batch.take(0, start, min(start + chunk, 70)).run(cpu.paged_attention_rows)
            for start in range(0, 70, chunk)
        ]
        assert same_bits(torch.cat(parts), whole), f"chunks of {chunk}"


def test_exact_rows_are_the_same_in_any_company_and_order() -> None:
    lengths = [(0, 9), (40, 1), (0, 0), (17, 33), (64, 8)]
    batch = _batch(lengths, heads=9, padding=3)
    whole = batch.run(cpu.paged_attention_rows)
    parts = {}
    for n, (_, new) in enumerate(lengths):
        start = int(batch.cu_seqlens[n])
        parts[n] = whole[start : start + new]
        assert same_bits(batch.take(n, 0, new).run(cpu.paged_attention_rows), parts[n])
    order = [4, 2, 0, 3, 1]
    shuffled = replace(
        batch,
        q=torch.cat([batch.q[int(batch.cu_seqlens[n]) :][: lengths[n][1]] for n in order]),
        rows=batch.rows[order],
        cu_seqlens=F.pad(torch.tensor([lengths[n][1] for n in order]).cumsum(0), (1, 0)),
        prefix_lens=batch.prefix_lens[order],
    )
    assert same_bits(shuffled.run(cpu.paged_attention_rows), torch.cat([parts[n] for n in order]))


def test_exact_rows_do_not_depend_on_where_the_cache_rows_lie() -> None:
    batch = _batch([(30, 12)])
    moved = torch.randperm(len(batch.cache), generator=torch.Generator().manual_seed(5))
    cache = torch.empty_like(batch.cache)
    cache[moved] = batch.cache
    elsewhere = replace(batch, cache=cache, table=moved[batch.table])
    assert same_bits(elsewhere.run(cpu.paged_attention_rows), batch.run(cpu.paged_attention_rows))


def test_exact_heads_do_not_depend_on_the_other_heads() -> None:
    batch = _batch([(30, 12)], heads=19)
    whole = batch.run(cpu.paged_attention_rows)
    for first, last in ((0, 1), (3, 12), (16, 19)):
        part = replace(batch, q=batch.q[:, first:last]).run(cpu.paged_attention_rows)
        assert same_bits(part, whole[:, first:last])


def test_exact_rows_do_not_depend_on_the_threads() -> None:
    batch = _batch([(100, 5), (0, 90)], heads=9)
    with torch_threads(1):
        one = batch.run(cpu.paged_attention_rows)
    with torch_threads(2):
        assert same_bits(batch.run(cpu.paged_attention_rows), one)
