"""mla's Triton kernels against the oracle, over pages in any order."""

from __future__ import annotations

import pytest
import torch

from sglang_k3.kernels import registry
from sglang_k3.kernels.mla import ascend_triton, reference
from sglang_k3.kernels.registry import Call
from tests.kernels.spans import scaled_error
from tests.kernels.triton.recorder import recording

LATENT, ROPE, PAGE = 32, 16, 64


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _batch(
    heads: int, prefixes: list[int], counts: list[int], padding: int = 0
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """q, cache, and the table with pages shuffled, request rows, bounds and prefixes. What is not written is
    NaN, and so is what a page holds behind a request's end."""
    pages = 12
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
    table = torch.zeros(4, 4 * PAGE, dtype=torch.int32)
    cache = torch.full((pages * PAGE, LATENT + ROPE), float("nan"))
    rows = torch.arange(len(counts)).flip(0)
    for n, row in enumerate(rows.tolist()):
        places = (order[3 * n : 3 * n + 3].unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()
        table[row, : len(places)] = places.int()
        length = prefixes[n] + counts[n]
        cache[places[:length]] = _random(length, LATENT + ROPE, seed=n)
    bounds = torch.tensor([0, *counts]).cumsum(0)
    q = _random(sum(counts) + padding, heads, LATENT + ROPE, seed=9)
    return q, cache, (table, rows, bounds, torch.tensor(prefixes))


@pytest.mark.parametrize("heads", [3, 6, 12])
@pytest.mark.parametrize("counts", [[1, 1, 1], [5, 0, 3]], ids=str)
def test_attention_over_ragged_requests(heads: int, counts: list[int]):
    q, cache, batch = _batch(heads, [150, 7, 63], counts, padding=2)
    want = reference.paged_attention(q, cache, *batch, 0.2, LATENT)
    parts = cache[:, :LATENT].contiguous(), cache[:, LATENT:].contiguous()
    with recording():
        got = ascend_triton.paged_attention(q, parts, *batch, 0.2, LATENT, reach=0, width=max(counts))
    assert scaled_error(got, want) < 2e-6 and not got[-2:].any()


def test_one_request_is_dealt_to_many_cores():
    q, cache, batch = _batch(6, [180], [1])
    want = reference.paged_attention(q, cache, *batch, 0.2, LATENT)
    parts = cache[:, :LATENT].contiguous(), cache[:, LATENT:].contiguous()
    with recording() as launches:
        got = ascend_triton.paged_attention(q, parts, *batch, 0.2, LATENT, reach=0, width=1)
    assert scaled_error(got, want) < 2e-6
    # Sixteen parts for three blocks: most are empty and weigh nothing.
    assert [launch.kernel for launch in launches] == ["attend", "join"] and launches[0].grid == (16,)


def test_a_call_that_does_not_fit_is_refused_with_the_reason():
    (entry,) = [one for one in registry.implementations("mla.paged_attention") if one.name == "triton"]
    fits = {"page": 128, "heads": 12}
    assert entry.refusal(Call("npu", torch.bfloat16, dims=fits)) is None
    assert "unknown length" in (entry.refusal(Call("npu", torch.bfloat16)) or "")
    assert "pages of 16" in (entry.refusal(Call("npu", torch.bfloat16, dims=fits | {"page": 16})) or "")
    assert "96 heads" in (entry.refusal(Call("npu", torch.bfloat16, dims=fits | {"heads": 96})) or "")
    q, cache, batch = _batch(17, [3], [1])
    with pytest.raises(ValueError, match="17 heads"):
        parts = cache[:, :LATENT], cache[:, LATENT:]
        ascend_triton.paged_attention(q, parts, *batch, 0.2, LATENT, reach=0, width=1)
