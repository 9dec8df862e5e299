"""A DSpark draft with random weights, scaled so that every part of it is heard: for tests and benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_k3.models.dspark_config import ARCHITECTURE, DraftConfig


def draft_config(
    *,
    hidden_size: int,
    vocab_size: int,
    target_layers: int,
    taps: list[int],
    mask_token: int,
    max_positions: int,
    **changes: Any,
) -> dict[str, Any]:
    """config.json of a small draft in RadixArk's format; `changes` replace or add fields."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 2 * hidden_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "block_size": 7,
        "num_target_layers": target_layers,
        "dflash_config": {"mask_token_id": mask_token, "target_layer_ids": taps},
        "markov_rank": 32,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return config | changes


def draft_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, in bf16."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in DraftConfig.from_file(config).tensor_shapes().items():
        if name.endswith(".bias"):
            tensors[name] = torch.zeros(shape)
        elif len(shape) == 1:
            tensors[name] = 1 + 0.1 * torch.randn(shape, generator=random)
        else:
            tensors[name] = torch.randn(shape, generator=random) * shape[1] ** -0.5
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def write_draft(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint folder that SGLang loads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
