"""Checkpoints of the ablation, each packed (MXFP4 experts) and dense with the same values."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.machine import has_bf16_instructions
from sglang_k3.kernels.mx.reference import dequantize_mxfp4
from sglang_k3.models.presets import real_k3_config
from sglang_k3.testing.bench_serving import Workload, random_ids, shared_prefix
from sglang_k3.testing.random_checkpoint import make

TINY = Path(__file__).parents[2] / "examples" / "tiny-k3"
TINY_DRAFT = TINY.parent / "tiny-k3-dspark"

Load = tuple[Workload, int, int]
"""Workload, concurrency, requests."""

# torch emulates bf16 products where the CPU has none: a gain over that would be the emulation's.
_DTYPE = "bfloat16" if has_bf16_instructions() else "float32"

# About 300 M parameters in the real one's proportions.
_300M: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 9,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "intermediate_size": 2048,
    "q_lora_rank": 384,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 64,
    "num_experts_per_token": 8,
    "moe_intermediate_size": 512,
    "routed_expert_hidden_size": 384,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 9],
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "num_heads": 12,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    },
}


@dataclass(frozen=True)
class Model:
    """packed, dense: folders of the two checkpoints. regime: what it can and cannot show. draft: folder of
    its DSpark draft, if there is one. loads: what it is measured with."""

    name: str
    packed: Path
    dense: Path
    dtype: str
    regime: str
    loads: tuple[Load, ...]
    draft: Path | None = None


def tiny(work: Path) -> Model:
    """The trained example. work: where the dense copy goes."""
    return Model(
        "tiny-k3",
        TINY,
        unpacked(TINY, work / "tiny-dense"),
        "bfloat16",
        "The trained example, 4 million parameters: the fixed cost of a step is nearly everything; it says "
        "nothing about a large model's kernels. Prompts are random tokens, behind which a small model soon "
        "repeats itself: a draft foresees that better than text (speculation.md has its gain on text).",
        ((random_ids(512, 128), 1, 4), (random_ids(512, 128), 8, 16), (shared_prefix(1024, 64, 64), 4, 16)),
        TINY_DRAFT,
    )


def medium(work: Path) -> Model:
    packed = make("k3", work / "300m", dtype="bfloat16", experts="mxfp4", text_config=_300M)
    return Model(
        "300M",
        packed,
        unpacked(packed, work / "300m-dense"),
        _DTYPE,
        "Random weights of about 300 million parameters in the real one's proportions: kernels count, and a "
        "layer still fits the caches; it does not show what a layer of real width costs.",
        ((random_ids(256, 32), 1, 4), (random_ids(256, 32), 8, 8)),
    )


def real_width(work: Path) -> Model:
    """A KDA layer with experts, behind the MLA layer without which no Kimi model is served."""
    published = real_k3_config()["text_config"]
    kept = ("hidden_size", "num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank")
    kept += ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_experts_per_token")
    kept += ("moe_intermediate_size", "routed_expert_hidden_size", "attn_res_block_size")
    layers = {"full_attn_layers": [1], "kda_layers": [2]}
    sizes = {key: published[key] for key in kept} | {
        "num_hidden_layers": 2,
        "intermediate_size": 1024,
        "num_experts": 64,
        "linear_attn_config": published["linear_attn_config"] | layers,
    }
    packed = make("k3", work / "slice", dtype="bfloat16", experts="mxfp4", text_config=sizes)
    return Model(
        "real-width slice",
        packed,
        unpacked(packed, work / "slice-dense"),
        _DTYPE,
        "Random weights: one KDA layer at the published widths (7168, 96 heads of 128) with 64 of 896 "
        "experts, behind one MLA layer with a narrow dense MLP. It shows what a layer costs; a server step "
        "has 93 of them, so the fixed cost of a step weighs too much here, and few rows reach one expert.",
        ((random_ids(128, 16), 1, 4), (random_ids(128, 16), 8, 8)),
    )


MODELS = {"tiny": tiny, "300m": medium, "slice": real_width}


def unpacked(packed: Path, directory: Path) -> Path:
    """A copy of a checkpoint with its MXFP4 experts as dense bf16 tensors of the same values."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in packed.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, directory)
    config = json.loads((packed / "config.json").read_text())
    config["text_config"].pop("quantization_config")
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    for file in packed.glob("*.safetensors"):
        tensors = load_file(file)
        dense = {}
        for name, tensor in tensors.items():
            if name.endswith(".weight_packed"):
                scale = tensors[name.replace("_packed", "_scale")]
                dense[name.removesuffix("_packed")] = dequantize_mxfp4(tensor, scale, torch.bfloat16)
            elif not name.endswith(".weight_scale"):
                dense[name] = tensor
        save_file(dense, directory / file.name)
    return directory
