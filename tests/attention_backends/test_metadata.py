"""What the backends derive from a batch: ranges, fresh states, checkpoints to keep."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_k3.attention_backends.metadata import NO_TRACK, BatchMetadata


class Mode:
    """The questions a forward mode answers."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode_or_idle(self) -> bool:
        return self.name in ("decode", "idle")

    def is_target_verify(self) -> bool:
        return self.name == "verify"

    def is_draft_extend_v2(self) -> bool:
        return False


class Pool:
    """Request row r owns slot 10 + r; row 0 is the padding row and owns the reserved slot 0."""

    def get_mamba_indices(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.where(rows == 0, 0, rows + 10).to(torch.int32)

    def translate_mamba_indices(self, slots: torch.Tensor) -> torch.Tensor:
        return slots


def batch(mode: str, rows: list[int], **fields: object) -> SimpleNamespace:
    values: dict[str, object] = {
        "mamba_track_mask": None,
        "mamba_track_indices": None,
        "mamba_track_seqlens": None,
    }
    values |= {
        name: torch.tensor(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return SimpleNamespace(
        logical_forward_mode=Mode(mode), req_pool_indices=torch.tensor(rows, dtype=torch.int64), **values
    )


def build(*args, **fields) -> BatchMetadata:
    return BatchMetadata.build(batch(*args, **fields), Pool())  # type: ignore[arg-type]


def test_an_extend_batch_has_ranges_prefixes_and_fresh_states() -> None:
    built = build("extend", [3, 1, 2], extend_prefix_lens=[0, 64, 5], extend_seq_lens=[7, 1, 0])
    assert not built.decode and not built.verify
    assert built.cu_seqlens.tolist() == [0, 7, 8, 8]
    assert built.prefix_lens.tolist() == [0, 64, 5]
    assert built.fresh.tolist() == [True, False, False]
    assert built.slots.tolist() == [13, 11, 12]
    assert built.track_offsets.tolist() == [NO_TRACK] * 3
    assert built.track_slots.tolist() == [NO_TRACK] * 3


def test_a_decode_batch_attends_to_everything_before_its_token() -> None:
    built = build("decode", [2, 0], seq_lens=[9, 1])
    assert built.decode
    assert built.cu_seqlens.tolist() == [0, 1, 2]
    assert built.prefix_lens.tolist() == [8, 0]
    assert built.slots.tolist() == [12, 0]
    assert built.copy_to.tolist() == []


@pytest.mark.parametrize("mode", ["decode", "idle", "extend"])
def test_a_batch_of_no_requests_has_no_ranges(mode: str) -> None:
    empty = torch.empty(0, dtype=torch.int64)
    built = build(mode, [], seq_lens=empty, extend_prefix_lens=empty, extend_seq_lens=empty)
    assert built.cu_seqlens.tolist() == [0]
    assert built.slots.shape == (0,)


@pytest.mark.parametrize(("prefix", "depth"), [(0, 64), (64, 192), (222, 272), (37, 101)])
def test_a_tracked_chunk_keeps_the_state_at_the_depth_asked_for(prefix: int, depth: int) -> None:
    built = build(
        "extend",
        [1],
        extend_prefix_lens=[prefix],
        extend_seq_lens=[150],
        mamba_track_mask=[True],
        mamba_track_indices=[44],
        mamba_track_seqlens=[depth],
    )
    assert built.track_offsets.tolist() == [depth - prefix]
    assert built.track_slots.tolist() == [44]


def test_rows_without_a_track_slot_are_not_tracked() -> None:
    built = build(
        "extend",
        [1, 2, 3],
        extend_prefix_lens=[0, 0, 0],
        extend_seq_lens=[64, 64, 64],
        mamba_track_mask=[True, False, True],
        mamba_track_indices=[-1, 45, 46],
        mamba_track_seqlens=[64, 64, 64],
    )
    assert built.track_slots.tolist() == [NO_TRACK, NO_TRACK, 46]
    assert built.track_offsets.tolist() == [NO_TRACK, NO_TRACK, 64]


def test_a_decode_step_on_a_boundary_copies_only_the_masked_slots() -> None:
    built = build(
        "decode",
        [1, 2, 3],
        seq_lens=[256, 255, 256],
        mamba_track_mask=[True, False, True],
        mamba_track_indices=[44, 45, -1],
    )
    assert built.copy_from.tolist() == [11]
    assert built.copy_to.tolist() == [44]


def verify_input(width: int, layout: object = None) -> SimpleNamespace:
    return SimpleNamespace(draft_token_num=width, ragged_verify_layout=layout)


def test_a_verify_batch_has_its_drafts_behind_the_committed_tokens() -> None:
    built = build("verify", [2, 3], seq_lens=[9, 1], spec_info=verify_input(8))
    assert built.verify and not built.decode
    assert built.cu_seqlens.tolist() == [0, 8, 16]
    assert built.prefix_lens.tolist() == [9, 1]
    assert built.slots.tolist() == [12, 13] and built.rows.tolist() == [2, 3]
    assert built.track_slots.tolist() == [NO_TRACK] * 2 and not built.copy_to.numel()


def test_a_ragged_verify_has_the_layouts_rows() -> None:
    layout = SimpleNamespace(qo_indptr_device=torch.tensor([0, 3, 4], dtype=torch.int32))
    built = build("verify", [1, 2], seq_lens=[5, 6], spec_info=verify_input(8, layout))
    assert built.cu_seqlens.tolist() == [0, 3, 4]


def test_a_verify_of_no_requests_has_no_ranges() -> None:
    built = build("verify", [], seq_lens=torch.empty(0, dtype=torch.int64), spec_info=verify_input(8))
    assert built.cu_seqlens.tolist() == [0] and built.verify
