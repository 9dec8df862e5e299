"""What both backends need to know about a batch, built once per forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_k3.speculative.replay_records import Tail

NO_TRACK = -1


def _verify_offsets(spec_info: Any, requests: int) -> torch.Tensor:
    """cu_seqlens [N+1] of a verify: as many drafted rows for each request, or a ragged layout's."""
    layout = spec_info.ragged_verify_layout
    if layout is None:
        return torch.arange(requests + 1, dtype=torch.int64) * spec_info.draft_token_num
    return layout.qo_indptr_device.to(torch.int64)


@dataclass(frozen=True)
class BatchMetadata:
    """One batch of N requests and T tokens; all tensors int64 unless said.

    decode: each request has exactly one token. verify: the tokens are drafts, which leave records and no
    state. rows [N]: the request's row in req_to_token.
    cu_seqlens [N+1]: token ranges; tokens past the last one are padding. prefix_lens [N]: tokens already
    in the caches. slots [N]: KDA state slot, -1 for none. fresh [N] bool: the state starts from zero.
    track_offsets, track_slots [N] (extend): copy the state after that many tokens of this call to that
    slot; NO_TRACK for none. copy_from, copy_to [M] (decode): slots to copy after the step. tail (verify):
    accepted tokens that the states lack.
    """

    decode: bool
    verify: bool
    rows: torch.Tensor
    cu_seqlens: torch.Tensor
    prefix_lens: torch.Tensor
    slots: torch.Tensor
    fresh: torch.Tensor
    track_offsets: torch.Tensor
    track_slots: torch.Tensor
    copy_from: torch.Tensor
    copy_to: torch.Tensor
    tail: Tail | None = None

    @staticmethod
    def build(batch: ForwardBatch, pool: HybridReqToTokenPool) -> BatchMetadata:
        """Raises ValueError for a forward mode the KDA backend cannot run."""
        mode = batch.logical_forward_mode
        if mode.is_draft_extend_v2():
            raise ValueError(f"forward mode {mode} belongs to EAGLE drafts, which have no KDA states")
        decode, verify = mode.is_decode_or_idle(), mode.is_target_verify()
        rows = batch.req_pool_indices.to(torch.int64)
        count = rows.shape[0]
        slots = pool.translate_mamba_indices(pool.get_mamba_indices(rows)).to(torch.int64)
        if decode:
            # A decode batch's seq_lens already count the token it is about to compute.
            prefix_lens = batch.seq_lens.to(torch.int64) - 1
            cu_seqlens = torch.arange(count + 1, dtype=torch.int64)
        elif verify:
            # A verify batch's seq_lens are the committed tokens alone; the drafts come after them.
            prefix_lens = batch.seq_lens.to(torch.int64)
            cu_seqlens = _verify_offsets(batch.spec_info, count)
        else:
            assert batch.extend_prefix_lens is not None and batch.extend_seq_lens is not None
            prefix_lens = batch.extend_prefix_lens.to(torch.int64)
            cu_seqlens = torch.zeros(count + 1, dtype=torch.int64)
            torch.cumsum(batch.extend_seq_lens.to(torch.int64), 0, out=cu_seqlens[1:])

        untracked = torch.full((count,), NO_TRACK, dtype=torch.int64)
        track_offsets, track_slots = untracked, untracked
        copy_from = copy_to = slots[:0]
        mask = batch.mamba_track_mask
        if mask is not None and batch.mamba_track_indices is not None and count:
            targets = pool.translate_mamba_indices(batch.mamba_track_indices).to(torch.int64)
            wanted = mask & (targets >= 0)
            if decode:
                copy_from, copy_to = slots[wanted], targets[wanted]
            elif batch.mamba_track_seqlens is not None:
                # The depth itself, by prefix_cache.checkpoints (SGLang's own backends read it as a code).
                offsets = batch.mamba_track_seqlens.to(torch.int64) - prefix_lens
                track_offsets = torch.where(wanted, offsets, untracked)
                track_slots = torch.where(wanted, targets, untracked)
        return BatchMetadata(
            decode=decode,
            verify=verify,
            rows=rows,
            cu_seqlens=cu_seqlens,
            prefix_lens=prefix_lens,
            slots=slots,
            # A state is only there to start from when some of the prompt was computed or restored before.
            fresh=prefix_lens <= 0,
            track_offsets=track_offsets,
            track_slots=track_slots,
            copy_from=copy_from,
            copy_to=copy_to,
        )
