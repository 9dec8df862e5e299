"""Grids, offsets and bytes of our launches at Kimi K3's sizes, and the faults that these checks find."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_k3.kernels.kda import ascend_triton as kda
from sglang_k3.kernels.kda import ascend_triton_block as kda_block
from sglang_k3.kernels.kda import ascend_triton_chunk as kda_chunk
from sglang_k3.kernels.short_conv import ascend_triton as conv
from sglang_k3.kernels.triton_targets import TARGETS, target
from tests.kernels.triton import measure
from tests.kernels.triton import planted as planted_kernels
from tests.kernels.triton.recorder import Objection, check_grid, recording
from tests.kernels.triton.workloads import BF16, K, V, Workload, workloads

planted: Any = planted_kernels
BOUND = 1.15
"""The most that a kernel may move, in minima."""
UNHELD = 10
"""Where launches hand scratch to one another."""
LAYERS, REQUESTS, HEADS, WIDTH = 69, 64, 6, 8
"""Of Kimi K3 on 16 ranks: KDA layers, and the most requests that a server of ours is meant to run."""


@pytest.fixture
def sparse(tmp_path: Path) -> Callable[..., torch.Tensor]:
    """Makes tensors of zeros that take room only where they are touched: files with holes."""

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        return torch.from_file(str(path), shared=True, size=prod(shape), dtype=dtype).view(shape)

    return make


def _only_last(values: int) -> torch.Tensor:
    """[REQUESTS] int64: -1 but for the last request."""
    slots = torch.full((REQUESTS,), -1, dtype=torch.int64)
    slots[-1] = values
    return slots


# --- bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", workloads(), ids=lambda work: f"{work.name} {work.ranks}".strip())
def test_bytes_are_close_to_what_the_work_needs(work: Workload):
    with recording() as launches:
        work.run()
    counted = sum(launch.bytes for launch in launches)
    assert work.minimum <= counted < (BOUND if work.held else UNHELD) * work.minimum


def test_bytes_count_what_a_mask_lets_through():
    """Three states of 6 heads, read and written: the second request has no slot."""
    pool = torch.zeros(4, 2, 32, 32)
    rows = [torch.zeros(2, 2, 32) for _ in range(4)]
    with recording() as launches:
        kda.decode(*rows, torch.zeros(2, 2), pool, torch.tensor([3, -1]), 1.0)
    (launch,) = launches
    state, row = 2 * 32 * 32 * 4, 2 * 32 * 4
    assert launch.loaded == {"fp32": state + 4 * row + 2 * 4, "int64": 4 * 8}
    assert launch.stored == {"fp32": state + 2 * row}


# --- grids and offsets at the largest batch ----------------------------------------------------------------


def test_a_commit_of_all_layers_at_the_largest_batch(sparse: Callable[..., torch.Tensor]):
    """52,992 tiles of states (105,984 of half the size), in pools whose last element lies beyond 2**31."""
    slots = 512
    pools = sparse(LAYERS, slots, HEADS, V, K)
    bank = [sparse(LAYERS, REQUESTS, WIDTH, HEADS, K, dtype=t) for t in (torch.float32, BF16, torch.float32)]
    assert pools.numel() > 2**31 and LAYERS * REQUESTS * HEADS * 4 == 105_984
    last = pools[-1, -1]
    last.fill_(2.0)
    rows, none = torch.arange(REQUESTS), torch.full((REQUESTS,), -1)
    bank[2][-1, -1, 0] = -1.0  # log decay of the one accepted token
    chosen = _only_last(slots - 1)
    with recording(last_only=True) as launches:
        kda.commit(pools, chosen, chosen, rows, *bank, rows * 0, rows * 0 + 1, none, none, False)
    (launch,) = launches
    assert prod(launch.grid) == target().vector_cores
    # The last item's tile decayed; those of the programs that were left out did not.
    assert torch.allclose(last[-1, -1], torch.full((K,), 2.0).mul(torch.tensor(-1.0).exp()))
    assert float(last[0, 0, 0]) == 2.0


def test_windows_of_all_layers_at_the_largest_batch(sparse: Callable[..., torch.Tensor]):
    channels, slots = 3 * HEADS * K, 8192
    pools = sparse(LAYERS, slots, 3, channels, dtype=BF16)
    bank = sparse(LAYERS, REQUESTS, WIDTH, channels, dtype=BF16)
    assert pools.numel() > 2**31
    bank[-1, -1, 1, -1] = 5.0
    rows, none, chosen = torch.arange(REQUESTS), torch.full((REQUESTS,), -1), _only_last(slots - 1)
    with recording(last_only=True):
        conv.commit(pools, chosen, rows, bank, rows * 0 + 2, pools, none, none, False)
    assert pools[-1, -1, :, -1].tolist() == [0.0, 0.0, 5.0]


def test_decode_of_a_slot_far_into_the_pool(sparse: Callable[..., torch.Tensor]):
    slots = 24_000
    pool = sparse(slots, HEADS, V, K)
    assert pool.numel() > 2**31
    pool[-1] = 1.0
    q, k, v = (torch.ones(1, HEADS, K) for _ in range(3))
    with recording():
        out = kda.decode(
            q, k, v, torch.zeros(1, HEADS, K), torch.zeros(1, HEADS), pool, _only_last(slots - 1)[-1:], 1.0
        )
    assert torch.allclose(out, torch.full_like(out, K**0.5), rtol=1e-5)


def test_a_verify_as_products_of_a_slot_far_into_the_pool(sparse: Callable[..., torch.Tensor]):
    slots = 24_000
    pool = sparse(slots, HEADS, V, K)
    pool[-1] = 1.0
    rows = [torch.ones(WIDTH, HEADS, K) for _ in range(3)]
    bank = [torch.zeros(1, WIDTH, HEADS, K) for _ in range(3)]
    zero, bounds = torch.zeros(1, dtype=torch.int64), torch.tensor([0, WIDTH])
    with recording():
        out = kda_block.verify(
            *rows,
            torch.zeros(WIDTH, HEADS, K),
            torch.zeros(WIDTH, HEADS),
            pool,
            zero + slots - 1,
            bounds,
            zero,
            *bank,
            zero,
            zero,
            zero - 1,
            1.0,
            WIDTH,
        )
    assert torch.allclose(out, torch.full_like(out, K**0.5), rtol=1e-5)


def test_a_prefill_far_into_its_rows_and_its_pool(sparse: Callable[..., torch.Tensor]):
    """4,200 tokens with rows 2^19 elements apart and the last of 131,200 slots: bits as from small ones."""
    tokens, slots = 4200, 131_200
    wide, pool = sparse(tokens, 4096, K, dtype=BF16)[:, :1], sparse(slots, 1, V, K)
    assert wide.stride(0) * tokens > 2**31 and pool.numel() > 2**31
    draw = torch.Generator().manual_seed(0)
    wide.copy_(torch.randn(tokens, 1, K, generator=draw))
    value, beta = torch.randn(tokens, 1, V, generator=draw), torch.rand(tokens, 1, generator=draw)
    decay = -torch.rand(tokens, 1, K, generator=draw)
    one, ends = torch.ones(1, dtype=torch.int64), torch.tensor([0, tokens])
    small = torch.zeros(2, 1, V, K)
    results = []
    for rows, states, slot in ((wide.contiguous(), small, 1), (wide, pool, slots - 1)):
        with recording():
            results.append(
                kda_chunk.extend(
                    rows, rows, value, decay, beta, states, slot * one, ends, one > 1, -one, -one, 0.1
                )
            )
    assert torch.equal(*results) and torch.equal(small[1], pool[-1]) and small[1].any()


# --- faults ------------------------------------------------------------------------------------------------


def test_a_program_an_item_is_refused():
    x = torch.zeros(105_984 * 16)
    with recording(), pytest.raises(Objection, match="105,984 programs; CANN starts at most 65,535"):
        planted.item_a_program[(105_984,)](x, BLOCK=16)


def test_a_product_of_axes_counts_as_its_product():
    with pytest.raises(Objection, match="105,984"):
        check_grid((LAYERS, HEADS * REQUESTS, 4), 40)


def test_more_programs_than_cores_are_refused():
    with recording(), pytest.raises(Objection, match="41 programs on 40 cores"):
        planted.item_a_program[(41,)](torch.zeros(41 * 16), BLOCK=16)


def test_an_offset_in_32_bits_is_found(sparse: Callable[..., torch.Tensor]):
    x = sparse(2**31 + 64, dtype=torch.uint8)
    with recording(), pytest.raises(Objection, match="int32 overflow"):
        planted.narrow_offset[(1,)](x, 2**29, 5)
    with recording():
        planted.wide_offset[(1,)](x, 2**29, 5)
    assert int(x[2**31]) == 1


def test_an_access_beyond_a_tensor_is_found():
    with recording(), pytest.raises(Objection, match="a load outside the tensors"):
        planted.beyond_the_end[(1,)](torch.zeros(12), BLOCK=16)


def test_every_target_is_held_to_its_own_cores():
    assert [(one.name, one.vector_cores) for one in TARGETS] == [("910B3", 40), ("950PR", 64)]
    assert target("Ascend950PR_9579").name == "950PR" and target("Ascend910_9391").name == "910B3"


# --- measuring ---------------------------------------------------------------------------------------------


def test_the_measuring_script_times_an_operator():
    """On the host's clock and in the interpreter: the script's own course, no figure that means anything."""
    (row,) = measure.rows("cpu", {"acceptance.chain"}, rounds=2)
    assert (
        row["operator"] == "acceptance.chain" and row["copies"] == 1 and row["minimum_bytes"] == 32 * 15 * 8
    )
    assert len(row["microseconds"]) == 2 and row["median_microseconds"] > 0


def test_the_measuring_script_says_where_there_is_no_npu(tmp_path: Path):
    with pytest.raises(SystemExit, match="nothing was measured"):
        measure.main(tmp_path / "out.json")
    assert not list(tmp_path.iterdir())
