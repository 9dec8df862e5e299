"""Gated MLA in the absorbed form over SGLang's paged latent cache."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.runtime_context import get_exec

from sglang_k3.attention_backends.metadata import BatchMetadata
from sglang_k3.kernels.registry import Call, resolve


class K3MLABackend(AttentionBackend):
    """One operator for extend, mixed and decode batches: rows attend through req_to_token.

    Queries arrive absorbed, [T, H * (latent + rope)]; the cache row of a token is [latent | rope], its
    first `latent` columns being the value. The pool's rows need no copy: the kernel reads them in place.
    """

    forward_metadata: BatchMetadata
    needs_cpu_seq_lens = False

    def __init__(self, model_runner):
        super().__init__()
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        if model_runner.is_draft_worker:
            return  # a draft attends by its own operator
        exact = get_exec().deterministic.enable_deterministic_inference
        call = Call(torch.device(self.device).type, model_runner.dtype, exact, self._dims(model_runner))
        self.chosen, _ = resolve("mla.paged_attention", call)
        self.attend = self.chosen.function

    def _dims(self, model_runner: Any) -> dict[str, int]:
        """Sizes that an implementation may refuse."""
        return {}

    def init_forward_metadata(self, forward_batch) -> None:
        self.forward_metadata = BatchMetadata.build(forward_batch, self.req_to_token_pool)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """q [T, H*(L+R)], k [T, 1, L+R], v [T, 1, L] -> [T, H*L] in q.dtype."""
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        metadata = self.forward_metadata
        out = self.attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id).squeeze(1),
            self.req_to_token_pool.req_to_token,
            metadata.rows,
            metadata.cu_seqlens,
            metadata.prefix_lens,
            layer.scaling,
            layer.v_head_dim,
        )
        return out.reshape(out.shape[0], -1)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)
