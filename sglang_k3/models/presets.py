"""The published Kimi K3 config, for planning and for tests that need the real sizes."""

from __future__ import annotations

from typing import Any


def mxfp4_quantization() -> dict[str, Any]:
    """The quantization_config of a K3 checkpoint: routed experts in MXFP4, all else plain."""
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "group_size": 32,
                    "strategy": "group",
                    "symmetric": True,
                    "dynamic": False,
                    "observer": "minmax",
                    "scale_dtype": "torch.uint8",
                },
            }
        },
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
    }


def real_k3_config() -> dict[str, Any]:
    """config.json of Kimi K3: 93 layers, 2.78 T parameters."""
    num_layers = 93
    full_attention = [*range(4, num_layers, 4), num_layers]
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "media_placeholder_token_id": 163605,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "tie_word_embeddings": False,
        "text_config": {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "dtype": "bfloat16",
            "vocab_size": 163840,
            "hidden_size": 7168,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 96,
            "num_key_value_heads": 96,
            "intermediate_size": 33792,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1048576,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "num_experts": 896,
            "num_experts_per_token": 16,
            "num_shared_experts": 2,
            "moe_intermediate_size": 3072,
            "routed_expert_hidden_size": 3584,
            "latent_moe_use_norm": True,
            "moe_router_activation_func": "sigmoid",
            "moe_renormalize": True,
            "topk_method": "noaux_tc",
            "use_grouped_topk": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 0,
            "attn_res_block_size": 12,
            "tie_word_embeddings": False,
            "linear_attn_config": {
                "full_attn_layers": full_attention,
                "kda_layers": [layer for layer in range(1, num_layers + 1) if layer not in full_attention],
                "num_heads": 96,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "use_full_rank_gate": True,
                "gate_lower_bound": -5.0,
            },
            "quantization_config": mxfp4_quantization(),
        },
        "vision_config": {
            "patch_size": 14,
            "init_pos_emb_height": 64,
            "init_pos_emb_width": 64,
            "init_pos_emb_time": 4,
            "pos_emb_type": "divided_fixed",
            "pos_emb_interpolation_mode": "bilinear",
            "vt_num_attention_heads": 12,
            "vt_num_hidden_layers": 27,
            "vt_hidden_size": 1024,
            "vt_intermediate_size": 4096,
            "qkv_hidden_size": 1536,
            "merge_kernel_size": [2, 2],
            "merge_type": "sd2_tpool",
            "video_attn_type": "spatial_temporal",
            "mm_projector_type": "patchmergerv2",
            "mm_hidden_size": 1024,
            "text_hidden_size": 7168,
            "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-5,
            "norm_type": "rmsnorm",
            "activation_func": "gelu_pytorch_tanh",
            "mlp_type": "mlp2",
            "attn_bias": False,
            "linear_bias": False,
            "patch_embed_proj_bias": False,
        },
    }


def real_draft_config() -> dict[str, Any]:
    """config.json of RadixArk/Kimi-K3-DSpark: 5 layers, 7 drafted tokens, 2.25 G parameters."""
    return {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": 7168,
        "num_hidden_layers": 5,
        "num_attention_heads": 64,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "intermediate_size": 14336,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 163840,
        "max_position_embeddings": 1048576,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 65536,
        },
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 5,
        "block_size": 7,
        "num_target_layers": 93,
        "dflash_config": {"mask_token_id": 163824, "target_layer_ids": [7, 23, 51, 67, 83]},
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
