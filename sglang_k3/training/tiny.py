"""The config of the tiny K3 in examples/."""

from __future__ import annotations

from typing import Any

from sglang_k3.models.presets import mxfp4_quantization
from sglang_k3.training.tokenizer import TOKEN_IDS, VOCABULARY, token_id

SAMPLING = {"temperature": 0.8, "top_p": 0.95}
"""What the model is best sampled with: so small a model repeats itself under greedy decoding."""


def tiny_config() -> dict[str, Any]:
    """config.json of examples/tiny-k3, with every structural feature of the real one."""
    num_layers, hidden = 5, 192
    full_attention = [*range(4, num_layers, 4), num_layers]
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 16384,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "num_shared_experts": 1,
        "moe_intermediate_size": 128,
        "routed_expert_hidden_size": 64,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        "attn_res_block_size": 2,
        "tie_word_embeddings": False,
        "linear_attn_config": {
            "full_attn_layers": full_attention,
            "kda_layers": [layer for layer in range(1, num_layers + 1) if layer not in full_attention],
            "num_heads": 4,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        "quantization_config": mxfp4_quantization(),
        **TOKEN_IDS,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "language_model_only": True,
        "media_placeholder_token_id": token_id("<|media_pad|>"),
        "tie_word_embeddings": False,
        **TOKEN_IDS,
        "text_config": text,
    }
