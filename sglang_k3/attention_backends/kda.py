"""Kimi Delta Attention over SGLang's state pool: short conv, gates, recurrence, checkpoints."""

from __future__ import annotations

import math

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
from sglang.srt.runtime_context import get_exec

from sglang_k3.attention_backends.metadata import BatchMetadata
from sglang_k3.kernels.registry import Call, choose
from sglang_k3.models.config import K3Config
from sglang_k3.speculative.state_pool import records_of


class K3KDABackend(MambaAttnBackendBase):
    """States live in SGLang's pool: window [slots, W-1, C], S [slots, H, V, K], one slot a request.

    The only tensors written are the slots of the batch and, where the scheduler asks for a checkpoint
    (its track slots), those; of drafted tokens their records. Nothing is copied that the batch does not own.
    """

    forward_metadata: BatchMetadata
    needs_cpu_seq_lens = False

    def __init__(self, model_runner):
        super().__init__(model_runner)
        exact = get_exec().deterministic.enable_deterministic_inference
        cache = self.req_to_token_pool.mamba_pool.mamba_cache
        *_, value_dim, key_dim = cache.temporal.shape
        dims = {"K": key_dim, "V": value_dim, "taps": cache.conv[0].shape[2] + 1}
        bound = K3Config.from_hf(model_runner.model_config.hf_config).kda.gate_lower_bound
        if bound is not None:
            dims["gate_bound"] = math.floor(bound)
        call = Call(torch.device(self.device).type, model_runner.dtype, exact, dims)
        self.conv_extend = choose("short_conv.extend", call)
        self.conv_decode = choose("short_conv.decode", call)
        self.gate = choose("kda.gate", call)
        self.extend = choose("kda.extend", call)
        self.decode = choose("kda.decode", call)
        self.conv_verify = choose("short_conv.verify", call)
        self.verify = choose("kda.verify", call)

    def init_forward_metadata(self, forward_batch) -> None:
        self.forward_metadata = BatchMetadata.build(forward_batch, self.req_to_token_pool)

    def _inputs(self, layer, qkv, a, b):
        """Post-conv q, k, v as heads, and the gates: g [T, H, K] fp32 log decay, beta [T, H] fp32."""
        q, k, v = qkv.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
        g, beta = self.gate(a, b, layer.A_log, layer.dt_bias, layer.lower_bound)
        return (
            q.unflatten(-1, (-1, layer.head_q_dim)),
            k.unflatten(-1, (-1, layer.head_k_dim)),
            v.unflatten(-1, (-1, layer.head_v_dim)),
            g,
            beta,
        )

    def forward_decode(self, layer, forward_batch, mixed_qkv, a, b, **kwargs):
        """mixed_qkv [N, 3*H*K], a [N, H*K], b [N, H] -> o [1, N, H, V]."""
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        window, state = cache.conv[0], cache.temporal
        batch = self.forward_metadata
        qkv = self.conv_decode(mixed_qkv, layer.conv_weights, window, batch.slots)
        q, k, v, g, beta = self._inputs(layer, qkv, a, b)
        out = self.decode(q, k, v, g, beta, state, batch.slots, layer.head_k_dim**-0.5)
        if batch.copy_to.numel():
            window[batch.copy_to] = window[batch.copy_from]
            state[batch.copy_to] = state[batch.copy_from]
        return out.unsqueeze(0)

    def forward_extend(self, layer, forward_batch, mixed_qkv, a, b, **kwargs):
        """mixed_qkv [T, 3*H*K], a [T, H*K], b [T, H] -> o [1, T, H, V]. SGLang sends verify here too."""
        if self.forward_metadata.verify:
            return self._forward_verify(layer, mixed_qkv, a, b)
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        window, state = cache.conv[0], cache.temporal
        batch = self.forward_metadata
        spans = (batch.slots, batch.cu_seqlens, batch.fresh, batch.track_offsets, batch.track_slots)
        qkv = self.conv_extend(mixed_qkv, layer.conv_weights, window, *spans)
        q, k, v, g, beta = self._inputs(layer, qkv, a, b)
        out = self.extend(q, k, v, g, beta, state, *spans, layer.head_k_dim**-0.5)
        return out.unsqueeze(0)

    def _forward_verify(self, layer, mixed_qkv, a, b):
        """Drafted tokens: outputs and records; no state goes beyond the committed prefix."""
        pool = self.req_to_token_pool
        cache = pool.mamba2_layer_cache(layer.layer_id)
        records, batch = records_of(pool), self.forward_metadata
        assert records is not None and batch.tail is not None
        bank = records.layer(pool.mamba_map[layer.layer_id])
        spans = batch.cu_seqlens, batch.rows
        windows, at = cache.conv[0], batch.slots
        if bank.windows is not None:
            windows, at = bank.windows, torch.where(batch.slots < 0, batch.slots, batch.rows)
        qkv = self.conv_verify(mixed_qkv, layer.conv_weights, windows, at, *spans, bank.x)
        q, k, v, g, beta = self._inputs(layer, qkv, a, b)
        banks = bank.u, bank.k, bank.g
        slots, *tail = batch.tail
        out = self.verify(
            q, k, v, g, beta, cache.temporal, slots, *spans, *banks, *tail, layer.head_k_dim**-0.5
        )
        return out.unsqueeze(0)
