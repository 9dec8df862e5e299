"""What the Ascend backend knows of a batch: tensors on the device, and what the host knew anyway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.runtime_context import mamba_track_grid

from sglang_k3.attention_backends.metadata import NO_TRACK, BatchMetadata
from sglang_k3.kernels.kda.ascend_chunk import Plan, plan


@dataclass(frozen=True)
class AscendMetadata(BatchMetadata):
    """BatchMetadata (its copy_from and copy_to are [N] here, -1 for none), and of the host:

    width: most new rows of a request. reach: at least the longest request's positions, new rows included.
    table [N, reach]: the KV slot of each position, what lies behind a request's length being anything.
    lengths, prefixes: new rows of each request and cached ones (extend). layout: of a prefill's chunks.
    tracks: some request of a decode batch keeps a checkpoint, or may keep one behind a verify.
    """

    width: int = 1
    reach: int = 1
    table: torch.Tensor | None = None
    lengths: tuple[int, ...] = ()
    prefixes: tuple[int, ...] = ()
    layout: Plan | None = None
    tracks: bool = False

    @staticmethod
    def build(batch: Any, pool: Any, page: int = 1) -> AscendMetadata:
        """page: tokens of a KV page. Raises ValueError for a forward mode the KDA backend cannot run."""
        mode = batch.logical_forward_mode
        if mode.is_draft_extend_v2():
            raise ValueError(f"forward mode {mode} belongs to EAGLE drafts, which have no KDA states")
        decode, verify = mode.is_decode_or_idle(), mode.is_target_verify()
        rows = batch.req_pool_indices.to(torch.int64)
        count, device = rows.shape[0], rows.device
        slots = pool.translate_mamba_indices(pool.get_mamba_indices(rows)).to(torch.int64)
        seq_lens = batch.seq_lens.to(torch.int64)
        lengths: tuple[int, ...] = ()
        prefixes: tuple[int, ...] = ()
        width, layout = 1, None
        if decode:
            # A decode batch's seq_lens already count the token it is about to compute.
            prefix_lens, cu_seqlens = seq_lens - 1, torch.arange(count + 1, device=device)
        elif verify:
            prefix_lens, width = seq_lens, int(batch.spec_info.draft_token_num)
            ragged = batch.spec_info.ragged_verify_layout
            if ragged is None:
                cu_seqlens = torch.arange(count + 1, device=device) * width
            else:
                cu_seqlens = ragged.qo_indptr_device.to(torch.int64)
        else:
            lengths = tuple(int(length) for length in batch.extend_seq_lens_cpu)
            prefixes = tuple(int(length) for length in batch.extend_prefix_lens_cpu)
            prefix_lens, width = batch.extend_prefix_lens.to(torch.int64), max(lengths, default=1)
            cu_seqlens = torch.nn.functional.pad(batch.extend_seq_lens.to(torch.int64).cumsum(0), (1, 0))
            layout = plan(lengths, len(batch.input_ids), device)
        # With overlap the host knows no more than a bound of a verify's lengths.
        known = batch.seq_lens_cpu if not verify else batch.spec_info.live_seq_lens_cpu
        reach = int(known.max()) + (width if verify else 0) if count else 1

        none = torch.full((count,), NO_TRACK, dtype=torch.int64, device=device)
        track_offsets = track_slots = copy_to = none
        tracks = False
        mask = batch.mamba_track_mask
        if mask is not None and batch.mamba_track_indices is not None and count:
            targets = pool.translate_mamba_indices(batch.mamba_track_indices).to(torch.int64)
            wanted = mask & (targets >= 0)
            grid = mamba_track_grid(page)
            if verify:
                tracks = _may_cross(known, grid, page, width)
            elif decode:
                # A decode step keeps a state where the scheduler's own mask is set, at depths on its grid.
                tracks = bool((known % grid == 0).any())
                copy_to = torch.where(wanted, targets, none)
            elif batch.mamba_track_seqlens is not None:
                offsets = batch.mamba_track_seqlens.to(torch.int64) - prefix_lens
                track_offsets = torch.where(wanted, offsets, none)
                track_slots = torch.where(wanted, targets, none)
        return AscendMetadata(
            decode=decode,
            verify=verify,
            rows=rows,
            cu_seqlens=cu_seqlens,
            prefix_lens=prefix_lens,
            slots=slots,
            fresh=prefix_lens <= 0,
            track_offsets=track_offsets,
            track_slots=track_slots,
            copy_from=slots,
            copy_to=copy_to,
            width=width,
            reach=reach,
            table=pool.req_to_token[:, :reach][rows],
            lengths=lengths,
            prefixes=prefixes,
            layout=layout,
            tracks=tracks,
        )


def _may_cross(known: torch.Tensor, grid: int, page: int, width: int) -> bool:
    """Whether a run of up to `width` tokens may pass a multiple of `grid`.

    known [N]: what the host knows of each request's length: exactly, or with overlap what is allocated for
    it, which is at most a page and four verifies more than it has.
    """
    low, high = known - page - 4 * width, known + width
    return bool((high // grid > low // grid).any())
