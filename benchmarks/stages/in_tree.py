"""SGLang's own Kimi K3 class on the CPU platform, by the smallest changes that make it run.

The starting point of the ablation: correct, and not optimised. Its model, loader, router, experts, cache
and scheduler are SGLang's; the parts that SGLang has for GPUs only are replaced by plain torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
from sglang.srt.layers import attn_residual
from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
from sglang.srt.models.kimi_k3 import KimiK3LinearForCausalLM

from sglang_k3.attention_backends import NAME
from sglang_k3.attention_backends.kda import K3KDABackend
from sglang_k3.kernels.gated_rms_norm.reference import gated_rms_norm


def _normed(self: FusedRMSNormGated, x: torch.Tensor, g: torch.Tensor, *rest: object) -> torch.Tensor:
    """x, g [1, T, H, V] or [T, H, V] -> x's shape."""
    rows = x.reshape(-1, *x.shape[-2:])
    return gated_rms_norm(rows, g.reshape(len(rows), -1), self.weight.float(), self.eps).view(x.shape)


def _inputs(self: K3KDABackend, layer: Any, qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    """SGLang's class hands over heads and a batch dimension where ours hands over rows."""
    q, k, v = qkv.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
    rows = len(qkv)
    g, beta = self.gate(
        a.reshape(rows, -1),
        b.reshape(rows, -1),
        layer.A_log.reshape(-1)[: layer.num_v_heads].float(),
        layer.dt_bias.reshape(-1).float(),
        layer.lower_bound,
    )
    heads = (layer.num_q_heads, layer.num_k_heads, layer.num_v_heads)
    return *(part.unflatten(-1, (count, -1)) for part, count in zip((q, k, v), heads, strict=True)), g, beta


def _use_plain_torch() -> None:
    torch.cuda.Stream = lambda *args, **kwargs: None  # type: ignore[assignment,misc]
    attn_residual._mix_fused = attn_residual.aggregate_stream_torch
    FusedRMSNormGated.forward = _normed  # type: ignore[method-assign,assignment]
    K3KDABackend._inputs = _inputs
    # Without this a prefill takes the form for caches of keys and values, and reads the latent one.
    handlers.AttentionBackendRegistry.register(NAME, handlers._dispatch_mla_subtype)


class KimiK3ForConditionalGeneration(KimiK3LinearForCausalLM):
    """The text part under the published checkpoint's architecture name; experts have to be dense."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        _use_plain_torch()
        super().__init__(getattr(config, "text_config", config), None, prefix)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(
            (name.removeprefix("language_model.").replace("block_sparse_moe", "mlp"), tensor)
            for name, tensor in weights
        )
