"""Checkpoints with random weights that behave like a model.

A checkpoint of tiny weights (SGLang's `--load-format dummy` draws about 1e-3) hides every fault:
the layers add nothing and any two implementations agree. Here each matrix is scaled by its fan-in,
so activations stay of order 1, decays cover short and long memory, gates are neither open nor
shut, every norm weight and residual query is its own, the router's choice varies from token to
token, and the logits spread over several units.

    python -m sglang_k3.testing.random_checkpoint k3 DIRECTORY [--dtype bfloat16] [--experts dense]

A tensor depends on the seed and its own name alone, so two presets or dtypes share what they can.
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from sglang_k3.models.config import MXFP4_GROUP, K3Config
from sglang_k3.models.names import CheckpointTensor, expected_names
from sglang_k3.models.presets import mxfp4_quantization
from sglang_k3.testing.byte_tokenizer import SPECIAL_TOKENS, save_tokenizer

Experts = Literal["dense", "mxfp4"]
PRESETS = ("k3", "kimi-linear", "kimi-linear-transformers", "qwen3")

VOCABULARY = 512
_BOS = SPECIAL_TOKENS.index("[BOS]") + 256
_EOS = SPECIAL_TOKENS.index("<|end_of_msg|>") + 256
_PAD = SPECIAL_TOKENS.index("[PAD]") + 256
TOKEN_IDS = {"bos_token_id": _BOS, "eos_token_id": _EOS, "pad_token_id": _PAD}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# RMS of uniform random codes under scales of 1/2, 1 and 2.
_MXFP4_RMS = math.sqrt(sum(value**2 for value in _E2M1) / len(_E2M1) * (0.25 + 1.0 + 4.0) / 3.0)


def make(
    preset: str,
    directory: str | Path,
    *,
    dtype: str = "float32",
    experts: Experts = "dense",
    seed: int = 0,
    text_config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint with config.json, weights, generation config and tokenizer.

    preset: one of PRESETS. dtype: of all tensors that the real files keep in bf16. experts:
    "mxfp4" packs the routed experts as the real file does ("k3" only); "dense" holds the same
    values unpacked. text_config: keys that replace the preset's in the text config.

    Returns the directory. Raises ValueError for an unknown preset, dtype or combination.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: use one of {', '.join(PRESETS)}")
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: use one of {', '.join(_DTYPES)}")
    if experts == "mxfp4" and preset != "k3":
        raise ValueError(f"preset {preset!r} has no packed experts: use experts='dense'")
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    overrides = dict(text_config or {})
    if preset == "k3":
        _write_kimi(path, k3_config(dtype, experts, overrides), seed)
    elif preset == "kimi-linear":
        _write_kimi(path, kimi_linear_config(dtype, overrides), seed)
    else:
        from sglang_k3.testing import transformers_checkpoint

        transformers_checkpoint.write(preset, path, dtype, seed, overrides)
    _write_json(path / "generation_config.json", {**TOKEN_IDS, "do_sample": False})
    save_tokenizer(path, VOCABULARY)
    return path


def k3_config(dtype: str, experts: Experts, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A K3 of 13 layers with every kind: KDA x 3 : MLA, two MLA at the end, 4 residual blocks."""
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": dtype,
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "num_hidden_layers": 13,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 48,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "num_shared_experts": 2,
        "moe_intermediate_size": 128,
        "routed_expert_hidden_size": 128,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        "attn_res_block_size": 4,
        "tie_word_embeddings": False,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 13],
            "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11],
            "num_heads": 4,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        **TOKEN_IDS,
        **overrides,
    }
    if experts == "mxfp4":
        text["quantization_config"] = mxfp4_quantization()
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": dtype,
        "language_model_only": True,
        "media_placeholder_token_id": SPECIAL_TOKENS.index("<|media_pad|>") + 256,
        "tie_word_embeddings": False,
        **TOKEN_IDS,
        "text_config": text,
    }


def kimi_linear_config(dtype: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A Kimi Linear of 5 layers in Moonshot's dialect: low-rank gates, softplus decay, no latent."""
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": dtype,
        "vocab_size": VOCABULARY,
        "hidden_size": 192,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 384,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 48,
        "mla_use_nope": True,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 96,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3, 5],
            "num_heads": 3,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
        },
        **TOKEN_IDS,
        **overrides,
    }


def random_tensors(config: K3Config, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of the config's checkpoint, by name, in the dtypes it is stored in."""
    return {
        spec.name: (_expert_part if ".experts." in spec.name else _draw)(spec, config, seed).to(spec.dtype)
        for spec in expected_names(config)
    }


def draw_by_name(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Embedding, norm weight or projection of any model, fp32, told by its name.

    A projection maps inputs of RMS 1 to outputs of the RMS that `_GAINS` gives for its name.
    """
    normal = torch.randn(shape, generator=tensor_generator(name, seed))
    if name.endswith("embed_tokens.weight"):
        return normal
    if name.rpartition(".weight")[0].endswith("norm"):
        return 1.0 + 0.2 * normal
    return normal * (_gain(name) / math.sqrt(shape[-1]))


def tensor_generator(name: str, seed: int) -> torch.Generator:
    """A generator that depends on the seed and the tensor's name only."""
    # One hash for both: torch's generator looks at the low 32 bits of its seed alone.
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))


# RMS of a matrix's outputs for inputs of RMS 1, by the end of its name. What joins the residual
# stream is kept small beside the embedding, and the routed experts' part smaller still: a random
# model is chaotic otherwise, and rounding to bf16 (which moves a few tokens in a hundred to another
# expert) would swamp whatever a test compares.
_GAINS = {
    "lm_head.weight": 3.0,  # top-2 gaps of the logits of the order of 1
    "g_proj.weight": 1.5,
    "g_b_proj.weight": 1.5,
    ".b_proj.weight": 1.5,
    "q_b_proj.weight": 2.0,  # scores of std 2: attention picks tokens instead of averaging them
    "self_attn.q_proj.weight": 2.0,
    "o_proj.weight": 0.5,
    ".gate.weight": 1.5,  # the router
    "gate_proj.weight": 1.5,  # far enough out for SiTU's tanh to bend
    "up_proj.weight": 1.5,
    "down_proj.weight": 0.25,
    "routed_expert_down_proj.weight": 1.0,
    "routed_expert_up_proj.weight": 0.05,
    "res_proj.weight": 0.75,  # candidates of a residual mix weigh clearly different
}
_EXPERT_GAINS = {"w1": 2.0, "w3": 2.0, "w2": 0.05}


def _gain(name: str) -> float:
    endings = [ending for ending in _GAINS if name.endswith(ending)]
    return _GAINS[max(endings, key=len)] if endings else 1.0


def _draw(spec: CheckpointTensor, config: K3Config, seed: int) -> torch.Tensor:
    generator = tensor_generator(spec.name.removeprefix(config.name_prefix), seed)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(spec.shape, generator=generator) * (high - low) + low

    bounded = config.kda.gate_lower_bound is not None
    special: dict[str, Callable[[], torch.Tensor]] = {
        "e_score_correction_bias": lambda: 0.1 * torch.randn(spec.shape, generator=generator),
        "A_log": lambda: uniform(-0.4, 0.4) if bounded else uniform(-0.5, 1.4),
        # A log decay of about -0.002 to -3 a token before the token has its say.
        "dt_bias": lambda: uniform(-8.0, 0.5) if bounded else uniform(-7.0, 1.0),
        "conv1d.weight": lambda: _convolution(spec.shape, generator),
    }
    for ending, draw in special.items():
        if spec.name.endswith(ending):
            return draw()
    return draw_by_name(spec.name.removeprefix(config.name_prefix), spec.shape, seed)


def _convolution(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    taps = 0.5 * torch.randn(shape, generator=generator)
    taps[..., -1] += 0.7
    return taps


def _expert_part(spec: CheckpointTensor, config: K3Config, seed: int) -> torch.Tensor:
    """Codes, scales or values of one expert matrix: the same matrix whichever part is asked for."""
    stem, _, part = spec.name.removeprefix(config.name_prefix).rpartition(".")
    rows, columns = spec.shape
    columns *= {"weight": 1, "weight_packed": 2, "weight_scale": MXFP4_GROUP}[part]
    groups = -(-columns // MXFP4_GROUP)
    generator = tensor_generator(stem, seed)
    codes = torch.randint(0, 256, (rows, groups * MXFP4_GROUP // 2), generator=generator, dtype=torch.uint8)
    wanted = _EXPERT_GAINS[stem.rpartition(".")[2]] / math.sqrt(columns) / _MXFP4_RMS
    spread = torch.randint(-1, 2, (rows, groups), generator=generator)
    scale = (round(math.log2(wanted)) + 127 + spread).to(torch.uint8)
    if part == "weight_scale":
        return scale
    packed = codes[:, : columns // 2].contiguous()
    return packed if part == "weight_packed" else _unpack(packed, scale)


def _unpack(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The fp32 values of MXFP4 codes; low nibble first."""
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    values = torch.tensor((*_E2M1, *(-value for value in _E2M1)))[nibbles]
    factors = torch.exp2(scale.float() - 127.0).repeat_interleave(MXFP4_GROUP, dim=1)
    return values * factors[:, : values.shape[1]]


def _write_kimi(path: Path, raw: dict[str, Any], seed: int) -> None:
    _write_json(path / "config.json", raw)
    tensors = random_tensors(K3Config.from_hf(raw), seed)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="float32")
    parser.add_argument("--experts", choices=("dense", "mxfp4"), default="dense")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make(**vars(arguments)))


if __name__ == "__main__":
    main()
