"""The presets that go through transformers' own classes; see random_checkpoint."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import KimiLinearForCausalLM, Qwen3Config, Qwen3ForCausalLM

from sglang_k3.models.config import K3Config
from sglang_k3.testing import random_checkpoint


def write(preset: str, directory: Path, dtype: str, seed: int, overrides: Mapping[str, Any]) -> None:
    """Save a "kimi-linear-transformers" or "qwen3" checkpoint: config.json and model.safetensors."""
    if preset == "qwen3":
        _qwen3(dtype, seed, overrides).save_pretrained(directory)
    else:
        _kimi_linear(dtype, seed, overrides).save_pretrained(directory)


def kimi_linear_config(dtype: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The "kimi-linear" preset in the transformers dialect."""
    raw = random_checkpoint.kimi_linear_config(dtype, {})
    linear = raw.pop("linear_attn_config")
    dense = raw.pop("first_k_dense_replace")
    layers = raw["num_hidden_layers"]
    for key in (
        "mla_use_nope",
        "moe_layer_freq",
        "moe_router_activation_func",
        "num_nextn_predict_layers",
        "topk_method",
        "use_grouped_topk",
    ):
        del raw[key]
    return {
        **raw,
        "layer_types": [
            "linear_attention" if layer + 1 in linear["kda_layers"] else "full_attention"
            for layer in range(layers)
        ],
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "linear_num_heads": linear["num_heads"],
        "linear_head_dim": linear["head_dim"],
        "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
        **overrides,
    }


def _kimi_linear(dtype: str, seed: int, overrides: Mapping[str, Any]) -> KimiLinearForCausalLM:
    raw = kimi_linear_config(dtype, overrides)
    tensors = random_checkpoint.random_tensors(K3Config.from_hf(raw), seed)
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "config.json").write_text(json.dumps(raw))
        save_file(tensors, Path(scratch, "model.safetensors"), metadata={"format": "pt"})
        return KimiLinearForCausalLM.from_pretrained(scratch, dtype=getattr(torch, dtype))


def _qwen3(dtype: str, seed: int, overrides: Mapping[str, Any]) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        **{
            "vocab_size": random_checkpoint.VOCABULARY,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            **random_checkpoint.TOKEN_IDS,
            **overrides,
        }
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(random_checkpoint.draw_by_name(name, tuple(parameter.shape), seed))
    return model.to(getattr(torch, dtype))
