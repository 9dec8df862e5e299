"""The backend of Kimi models on Ascend NPUs: `--attention-backend ascend`, as SGLang's users know it.

In decode and verify it asks the device for nothing and copies nothing between host and device, but for an
operator that takes lengths from the host (ascend_lengths.py); of the pools it touches the batch's own slots
alone. What of a batch the host knows anyway (lengths, the longest request) it takes from the host. What the
scheduler writes on a stream of its own, the tables of slots, is read once, before the layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from sglang.srt.distributed import divide
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.runtime_context import get_parallel

from sglang_k3.attention_backends.ascend_lengths import CopiedLengths
from sglang_k3.attention_backends.ascend_metadata import AscendMetadata
from sglang_k3.attention_backends.ascend_records import DeviceRecords
from sglang_k3.attention_backends.hybrid import DraftBackend, K3HybridBackend
from sglang_k3.attention_backends.kda import K3KDABackend
from sglang_k3.attention_backends.mla import K3MLABackend
from sglang_k3.kernels.ascend import put
from sglang_k3.kernels.mla.ascend import HostLengths
from sglang_k3.speculative.state_pool import records_of

NAME = "ascend"

_ROWS = 256
"""Rows of a prompt that attend at a time."""


class AscendKDABackend(K3KDABackend):
    """KDA over SGLang's state pool, whose layout is the same with and without speculation."""

    forward_metadata: AscendMetadata

    def forward_decode(self, layer, forward_batch, mixed_qkv, a, b, **kwargs):
        """mixed_qkv [N, 3*H*K], a [N, H*K], b [N, H] -> o [1, N, H, V]."""
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        window, state = cache.conv[0], cache.temporal
        batch = self.forward_metadata
        qkv = self.conv_decode(mixed_qkv, layer.conv_weights, window, batch.slots)
        q, k, v, g, beta = self._inputs(layer, qkv, a, b)
        out = self.decode(q, k, v, g, beta, state, batch.slots, layer.head_k_dim**-0.5)
        if batch.tracks:
            places = batch.slots.clamp(min=0)
            put(window, batch.copy_to, window[places])
            put(state, batch.copy_to, state[places])
        return out.unsqueeze(0)

    def forward_extend(self, layer, forward_batch, mixed_qkv, a, b, **kwargs):
        """mixed_qkv [T, 3*H*K], a [T, H*K], b [T, H] -> o [1, T, H, V]. SGLang sends verify here too."""
        if self.forward_metadata.verify:
            return self._forward_verify(layer, mixed_qkv, a, b)
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        batch = self.forward_metadata
        spans = (batch.slots, batch.cu_seqlens, batch.fresh, batch.track_offsets, batch.track_slots)
        qkv = self.conv_extend(mixed_qkv, layer.conv_weights, cache.conv[0], *spans)
        inputs = self._inputs(layer, qkv, a, b)
        out = self.extend(*inputs, cache.temporal, *spans, layer.head_k_dim**-0.5, layout=batch.layout)
        return out.unsqueeze(0)

    def _forward_verify(self, layer, mixed_qkv, a, b):
        pool = self.req_to_token_pool
        cache = pool.mamba2_layer_cache(layer.layer_id)
        records, batch = records_of(pool), self.forward_metadata
        assert records is not None and batch.tail is not None
        bank = records.layer(pool.mamba_map[layer.layer_id])
        slots, *tail = batch.tail
        spans = slots, batch.cu_seqlens, batch.rows
        qkv = self.conv_verify(mixed_qkv, layer.conv_weights, cache.conv[0], *spans, bank.x)
        inputs = self._inputs(layer, qkv, a, b)
        banks = bank.u, bank.k, bank.g
        out = self.verify(
            *inputs,
            cache.temporal,
            *spans,
            *banks,
            *tail,
            layer.head_k_dim**-0.5,
            width=batch.width,
        )
        return out.unsqueeze(0)


class AscendMLABackend(K3MLABackend):
    """Absorbed MLA over SGLang's NPU pool, which keeps latent and rope columns in two buffers."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._runner = model_runner
        self.whole: Part | None = None
        self.blocks: list[Part] = []

    def _dims(self, model_runner: Any) -> dict[str, int]:
        config = model_runner.model_config
        return {
            "heads": divide(config.num_attention_heads, get_parallel().attn_tp_size),
            "latent": config.kv_lora_rank,
            "rope": config.qk_rope_head_dim,
            "page": self.token_to_kv_pool.page_size,
        }

    def start(self, metadata: AscendMetadata) -> None:
        """A step begins: the scheduler may write its tables from here on, and an operator that takes lengths
        from the host gets them on their way."""
        self._runner.shared_read_done_event = torch.get_device_module(self.device).Event()
        self._runner.shared_read_done_event.record()
        if metadata.lengths:
            self.whole, self.blocks = None, list(_blocks(metadata))
        else:
            self.whole, self.blocks = self._of_all(metadata), []

    def _of_all(self, metadata: AscendMetadata) -> Part:
        """The rows of a decode or verify."""
        table, counts = metadata.table, metadata.cu_seqlens.diff()
        assert table is not None
        return Part(
            slice(None),
            table,
            torch.arange(len(table), device=table.device),
            metadata.cu_seqlens,
            metadata.prefix_lens,
            metadata.reach,
            metadata.width,
            CopiedLengths(counts, metadata.prefix_lens) if self.chosen.host else None,
        )

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """q [T, H*(L+R)], k [T, 1, L+R], v [T, 1, L] -> [T, H*L] in q.dtype."""
        pool, latent = self.token_to_kv_pool, layer.v_head_dim
        if save_kv_cache and k is not None:
            rows = k.view(-1, layer.qk_head_dim)
            # The pool's scatter takes whole tensors, not columns of one.
            parts = rows[:, :latent].contiguous(), rows[:, latent:].contiguous()
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, *(part.unsqueeze(1) for part in parts))
        keys, values = pool.get_kv_buffer(layer.layer_id)
        cache = keys.view(-1, latent), values.view(-1, layer.qk_head_dim - latent)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if self.whole is not None:
            out = self._attend(self.whole, queries, cache, layer)
        else:
            # Rows of padding are nobody's.
            out = queries.new_zeros(*queries.shape[:2], latent)
            for part in self.blocks:
                out[part.rows] = self._attend(part, queries, cache, layer)
        return out.reshape(out.shape[0], -1)

    def _attend(self, part: Part, queries: torch.Tensor, cache: tuple, layer: Any) -> torch.Tensor:
        """queries [T, H, L+R] of all rows -> [rows of the part, H, L]."""
        return self.attend(
            queries[part.rows],
            cache,
            part.table,
            part.table_rows,
            part.cu_seqlens,
            part.prefix_lens,
            layer.scaling,
            layer.v_head_dim,
            reach=part.reach,
            width=part.width,
            lengths=part.lengths,
        )


class Part(NamedTuple):
    """Rows of a batch that attend together, and what attention asks of them: `mla.paged_attention`."""

    rows: slice
    table: torch.Tensor
    table_rows: torch.Tensor
    cu_seqlens: torch.Tensor
    prefix_lens: torch.Tensor
    reach: int
    width: int
    lengths: HostLengths | None


def _blocks(batch: AscendMetadata) -> Iterator[Part]:
    """A prefill's rows request by request and block by block, so that nothing is padded to the longest
    prompt."""
    table = batch.table
    assert table is not None
    first_row = torch.zeros(1, dtype=torch.int64, device=table.device)
    begin = 0
    for n, (length, prefix) in enumerate(zip(batch.lengths, batch.prefixes, strict=True)):
        for first in range(0, length, _ROWS):
            rows = min(_ROWS, length - first)
            yield Part(
                slice(begin + first, begin + first + rows),
                table[n : n + 1],
                first_row,
                torch.arange(0, 2 * rows, rows, device=table.device),
                batch.prefix_lens[n : n + 1] + first,
                batch.reach,
                rows,
                partial(_known, rows, prefix + first + rows),
            )
        begin += length


def _known(rows: int, positions: int) -> tuple[list[int], list[int]]:
    """`HostLengths` of one request, which the host knows anyway."""
    return [rows], [positions]


class AscendHybridBackend(K3HybridBackend):
    """Routes layers; one metadata object for both children, records opened and closed on the device."""

    full_attn_backend: AscendMLABackend

    def init_forward_metadata(self, forward_batch) -> None:
        pool = self.req_to_token_pool
        metadata = AscendMetadata.build(
            forward_batch, pool, self.full_attn_backend.token_to_kv_pool.page_size
        )
        records = records_of(pool)
        if records is not None:
            assert isinstance(records, DeviceRecords)
            records.look()
            if metadata.verify:
                records.tracking = metadata.tracks
                tail = records.opened(pool.mamba_pool, metadata.rows, metadata.prefix_lens, metadata.slots)
                metadata = replace(metadata, slots=tail.slots, tail=tail)
            else:
                # A session's turn goes on from a state that may lack the last turn's tail.
                kept = torch.where(metadata.fresh, -1, metadata.slots)
                records.settle(pool.mamba_pool, metadata.rows, kept)
                records.forget(metadata.rows)
                records.forget_slots(torch.cat([metadata.slots, metadata.track_slots]))
        self.full_attn_backend.start(metadata)
        self.linear_attn_backend.forward_metadata = metadata


def wrap(original, runner: Any, full_attn_backend: Any) -> Any:
    """AROUND hook on SGLang's `attn_backend_wrapper`: our router for our backend, SGLang's for the rest."""
    if not isinstance(full_attn_backend, AscendMLABackend):
        return original(runner, full_attn_backend)
    if runner.is_draft_worker:
        return DraftBackend()
    layers = runner.model_config.hf_text_config.full_attention_layer_ids
    backend: HybridLinearAttnBackend = AscendHybridBackend(
        full_attn_backend, AscendKDABackend(runner), layers
    )
    return backend


def create(original, runner: Any) -> Any:
    """What the name `ascend` builds: our backend for Kimi models and their drafts, SGLang's for the rest."""
    from sglang_k3.architectures import ARCHITECTURES, DRAFT_ARCHITECTURES, architecture_of

    if architecture_of(runner.model_config) in ARCHITECTURES | DRAFT_ARCHITECTURES:
        return AscendMLABackend(runner)
    return original(runner)
