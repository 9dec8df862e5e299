"""Routes a hybrid model's layers: KDA layers to one backend, MLA layers to the other."""

from __future__ import annotations

from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

from sglang_k3.attention_backends.kda import K3KDABackend
from sglang_k3.attention_backends.metadata import BatchMetadata
from sglang_k3.attention_backends.mla import K3MLABackend


class K3HybridBackend(HybridLinearAttnBackend):
    """SGLang's router of layers, with one metadata object for both of its children."""

    full_attn_backend: K3MLABackend
    linear_attn_backend: K3KDABackend

    def init_forward_metadata(self, forward_batch) -> None:
        metadata = BatchMetadata.build(forward_batch, self.req_to_token_pool)
        self.full_attn_backend.forward_metadata = metadata
        self.linear_attn_backend.forward_metadata = metadata


def wrap(original, runner, full_attn_backend):
    """AROUND hook on SGLang's `attn_backend_wrapper`: our router for our backend, SGLang's for the rest."""
    if not isinstance(full_attn_backend, K3MLABackend):
        return original(runner, full_attn_backend)
    layers = runner.model_config.hf_text_config.full_attention_layer_ids
    return K3HybridBackend(full_attn_backend, K3KDABackend(runner), layers)
