"""Routes a hybrid model's layers: KDA layers to one backend, MLA layers to the other."""

from __future__ import annotations

from dataclasses import replace

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

from sglang_k3.attention_backends.kda import K3KDABackend
from sglang_k3.attention_backends.metadata import BatchMetadata
from sglang_k3.attention_backends.mla import K3MLABackend
from sglang_k3.speculative.state_pool import records_of


class K3HybridBackend(HybridLinearAttnBackend):
    """SGLang's router of layers, with one metadata object for both of its children."""

    full_attn_backend: K3MLABackend
    linear_attn_backend: K3KDABackend

    def init_forward_metadata(self, forward_batch) -> None:
        pool = self.req_to_token_pool
        metadata = BatchMetadata.build(forward_batch, pool)
        records = records_of(pool)
        if metadata.verify:
            assert records is not None
            tail = records.opened(pool.mamba_pool, metadata.rows, metadata.prefix_lens, metadata.slots)
            metadata = replace(metadata, slots=tail.slots, tail=tail)
        elif records is not None:
            # A session's turn goes on from a state that may lack the last turn's tail.
            kept = ~metadata.fresh
            records.settle(pool.mamba_pool, metadata.rows[kept], metadata.slots[kept])
            records.forget(metadata.rows)
            records.forget_slots(torch.cat([metadata.slots, metadata.track_slots]))
        self.full_attn_backend.forward_metadata = metadata
        self.linear_attn_backend.forward_metadata = metadata

    def commit(
        self,
        request_rows: torch.Tensor,
        depths: torch.Tensor,
        counts: torch.Tensor,
        track_offsets: torch.Tensor,
        track_slots: torch.Tensor,
    ) -> None:
        """The accepted tokens of the last verify enter the states, now or with a later verify; all [N] int64.

        request_rows: rows of req_to_token. depths: committed tokens before the verify. counts: accepted
        tokens. track_offsets, track_slots: a checkpoint inside the accepted run, or -1. Raises StaleRecords.
        """
        pool = self.req_to_token_pool
        records = records_of(pool)
        assert records is not None
        records.commit(
            pool.mamba_pool,
            bank_rows=request_rows,
            depths=depths,
            counts=counts,
            track_offsets=track_offsets,
            track_slots=track_slots,
        )


class DraftBackend(AttentionBackend):
    """For a draft model's runner: a DSpark draft attends by its own operator (models/dspark_draft.py)."""

    needs_cpu_seq_lens = False

    def init_forward_metadata(self, forward_batch) -> None:
        pass


def wrap(original, runner, full_attn_backend):
    """AROUND hook on SGLang's `attn_backend_wrapper`: our router for our backend, SGLang's for the rest."""
    if not isinstance(full_attn_backend, K3MLABackend):
        return original(runner, full_attn_backend)
    if runner.is_draft_worker:
        return DraftBackend()
    layers = runner.model_config.hf_text_config.full_attention_layer_ids
    return K3HybridBackend(full_attn_backend, K3KDABackend(runner), layers)
