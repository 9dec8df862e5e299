"""SGLang's own Kimi K3 model class on a CPU, one prompt at a time, as an independent oracle.

    TRITON_INTERPRET=1 SGLANG_PLUGINS=none python -m tests.models.in_tree CHECKPOINT PROMPTS OUTPUT

PROMPTS: JSON list of token id lists. OUTPUT: a safetensors file with the logits [T, vocabulary] of each
prompt under its index. Nothing of ours is imported here. SGLang's model, weight loader, convolution,
gated norm and KDA recurrence run as they are, the Triton kernels under Triton's interpreter; what needs a
GPU is replaced below, and plain attention stands in for the paged one.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import (
    fused_sigmoid_gating_delta_rule_update,
)
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.bootstrap import init_layer_runtime
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers import attn_residual
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.kimi_k3 import KimiK3LinearForCausalLM
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs


class WholePromptBackend:
    """Attention over one whole prompt: no pages, no states carried over."""

    # The handler of this name takes the form that is not absorbed, so queries meet the real keys.
    prefill_attention_backend_str = decode_attention_backend_str = "triton"
    data_type = torch.float32
    # The model stores its latents; nobody reads them here.
    token_to_kv_pool = SimpleNamespace(set_kv_buffer=lambda *args, **kwargs: None)

    def forward(self, q=None, k=None, v=None, layer: Any = None, *args, mixed_qkv=None, a=None, b=None, **_):
        if mixed_qkv is not None:
            return self._delta_rule(layer, mixed_qkv, a, b)
        return self._softmax(layer, q, k, v)

    def _softmax(self, layer, q, k, v) -> torch.Tensor:
        """Causal attention with float64 sums -> [T, H * V]."""
        q = q.view(len(q), layer.tp_q_head_num, layer.qk_head_dim)
        q, k, v = (part.double().transpose(0, 1) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scaling)
        return out.transpose(0, 1).flatten(1).float()

    def _delta_rule(self, layer, mixed_qkv, a, b) -> torch.Tensor:
        """SGLang's convolution and its fused gate and recurrence from a zero state -> [1, T, H, V]."""
        tokens, channels = mixed_qkv.shape
        bounds, slot = torch.tensor([0, tokens], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        convolved = causal_conv1d_fn(
            mixed_qkv.contiguous().T,
            layer.conv_weights,
            layer.bias,
            torch.zeros(1, layer.conv_weights.shape[1] - 1, channels).transpose(1, 2),
            query_start_loc=bounds,
            seq_lens_cpu=[tokens],
            cache_indices=slot,
            has_initial_state=torch.zeros(1, dtype=torch.bool),
        ).T
        q, k, v = convolved.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
        return fused_sigmoid_gating_delta_rule_update(
            A_log=layer.A_log,
            a=a.reshape(1, tokens, -1),
            dt_bias=layer.dt_bias,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=q.reshape(1, tokens, layer.num_q_heads, layer.head_q_dim),
            k=k.reshape(1, tokens, layer.num_k_heads, layer.head_k_dim),
            v=v.reshape(1, tokens, layer.num_v_heads, layer.head_v_dim),
            b=b.contiguous(),
            initial_state_source=torch.zeros(1, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim),
            initial_state_indices=slot,
            cu_seqlens=bounds,
            use_qk_l2norm_in_kernel=True,
            is_kda=True,
            lower_bound=layer.lower_bound,
        )


@contextmanager
def cpu_stand_ins() -> Iterator[None]:
    """What the model asks of a GPU: side streams (unused off a graph), and a Triton mix of wide rows only."""
    with (
        patch.object(torch.cuda, "Stream", lambda *args, **kwargs: None),
        patch.object(attn_residual, "_mix_fused", attn_residual.aggregate_stream_torch),
    ):
        yield


def start_process(checkpoint: Path) -> ModelConfig:
    """Publish server arguments and build one-rank groups, as a scheduler process does."""
    settings: dict[str, Any] = {
        "model_path": str(checkpoint),
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "mamba_radix_cache_strategy": "no_buffer",
        "page_size": 1,
    }
    arguments = ServerArgs(**settings)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_distributed_environment(
        backend="gloo",
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )
    initialize_model_parallel()
    initialize_dp_attention(server_args=arguments)
    config = ModelConfig.from_server_args(arguments)
    init_layer_runtime(model_config=config)
    return config


def build(checkpoint: Path) -> KimiK3LinearForCausalLM:
    """The model with the checkpoint's weights, under the names SGLang's outer class would pass on."""
    config = start_process(checkpoint)
    model = KimiK3LinearForCausalLM(config.hf_config.text_config)
    tensors = load_file(checkpoint / "model.safetensors")
    model.load_weights(
        (name.removeprefix("language_model.").replace("block_sparse_moe", "mlp"), tensor)
        for name, tensor in tensors.items()
    )
    return model


@torch.no_grad()
def logits(model: KimiK3LinearForCausalLM, prompt: list[int]) -> torch.Tensor:
    """[T, vocabulary] of one prompt, prefilled whole."""
    tokens, length = torch.tensor(prompt), len(prompt)
    positions = torch.arange(length)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=tokens,
        req_pool_indices=torch.zeros(1, dtype=torch.int64),
        seq_lens=torch.tensor([length]),
        seq_lens_cpu=torch.tensor([length]),
        seq_lens_sum=length,
        out_cache_loc=positions,
        positions=positions,
        extend_num_tokens=length,
        extend_seq_lens=torch.tensor([length]),
        extend_seq_lens_cpu=[length],
        extend_prefix_lens=torch.tensor([0]),
        extend_prefix_lens_cpu=[0],
    )
    backend: Any = WholePromptBackend()
    with forward_context(ForwardContext(attn_backend=backend), forward_batch=batch):
        hidden = model.model(tokens, positions, batch)
    head: Any = model.lm_head
    return hidden @ head.weight[: model.config.vocab_size].T


def main(checkpoint: str, prompts: str, output: str) -> None:
    torch.set_default_dtype(torch.float32)
    with cpu_stand_ins():
        model = build(Path(checkpoint))
        answers = [logits(model, prompt) for prompt in json.loads(Path(prompts).read_text())]
    save_file({str(index): answer.contiguous() for index, answer in enumerate(answers)}, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
