"""The config of the tiny K3's draft in examples/."""

from __future__ import annotations

from typing import Any

from sglang_k3.models.dspark_config import ARCHITECTURE
from sglang_k3.training.tokenizer import VOCABULARY, token_id

GAMMA = 7


def tiny_draft_config() -> dict[str, Any]:
    """config.json of examples/tiny-k3-dspark, in the format of RadixArk/Kimi-K3-DSpark."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 16384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 2,
        "block_size": GAMMA,
        "num_target_layers": 5,
        "dflash_config": {"mask_token_id": token_id("<|media_pad|>"), "target_layer_ids": [0, 2, 4]},
        "markov_rank": 64,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
