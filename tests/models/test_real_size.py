"""The served model at the real size: parameter counts, every checkpoint name, shards of eight ranks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEADS, A_LOG = 96, 128


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.real_size_probe"],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index('{"parameters"') :])


def logical(name: str, shape: list[int]) -> int:
    """Parameters a tensor stands for: packed weights unpacked, scales none, A_log with its padding."""
    if name.endswith("_scale"):
        return 0
    if name.endswith("A_log"):
        return A_LOG
    return math.prod(shape) * (2 if name.endswith("_packed") else 1)


def test_the_text_model_has_2_779_484_478_208_parameters(built: dict[str, Any]) -> None:
    total = sum(logical(name, shape) for name, (shape, _) in built["parameters"].items())
    assert total == 2_779_484_478_208


def test_packed_experts_stay_packed(built: dict[str, Any]) -> None:
    experts = {name: kind for name, kind in built["parameters"].items() if ".experts." in name}
    assert len(experts) == 92 * 4
    assert {dtype for _, dtype in experts.values()} == {"uint8"}
    assert experts["model.layers.1.mlp.experts.w13_packed"][0] == [896, 6144, 1792]
    assert experts["model.layers.92.mlp.experts.w2_scale"][0] == [896, 3584, 96]


def test_each_of_the_497220_names_is_loaded_once_or_skipped_as_vision(built: dict[str, Any]) -> None:
    vision = 2 + 27 * 6 + 1 + 3
    assert built["vision_skipped"] == vision
    assert built["loaded"] + built["vision_skipped"] == 497_220


def test_eight_ranks_hold_an_eighth_of_heads_experts_and_vocabulary(built: dict[str, Any]) -> None:
    shard = built["shard"]
    kda, mla, moe = (f"model.layers.{layer}." for layer in (0, 3, 1))
    kda, mla, moe = (name.removeprefix("model.") for name in (kda, mla, moe))
    table = {
        f"{kda}self_attn.A_log": [12],
        f"{kda}self_attn.dt_bias": [12 * 128],
        f"{kda}self_attn.conv_weight": [3 * 12 * 128, 4],
        f"{kda}self_attn.in_proj.weight": [4 * 12 * 128 + 12, 7168],
        f"{kda}self_attn.f_a_proj.weight": [128, 7168],
        f"{kda}self_attn.f_b_proj.weight": [12 * 128, 128],
        f"{kda}self_attn.o_norm_weight": [128],
        f"{kda}self_attn.o_proj.weight": [7168, 12 * 128],
        f"{kda}mlp.gate_up_proj.weight": [2 * 33792 // 8, 7168],
        f"{kda}mlp.down_proj.weight": [7168, 33792 // 8],
        f"{mla}self_attn.q_b_proj.weight": [12 * 192, 1536],
        f"{mla}self_attn.kv_a_proj_with_mqa.weight": [576, 7168],
        f"{mla}self_attn.kv_b_proj.weight": [12 * 256, 512],
        f"{mla}self_attn.o_proj.weight": [7168, 12 * 128],
        f"{moe}mlp.router.weight": [896, 7168],
        f"{moe}mlp.latent_down.weight": [3584, 7168],
        f"{moe}mlp.latent_up.weight": [7168, 3584],
        f"{moe}mlp.experts.w13_packed": [896, 2 * 384, 1792],
        f"{moe}mlp.experts.w2_packed": [896, 3584, 192],
        f"{moe}mlp.experts.w2_scale": [896, 3584, 12],
        f"{moe}mlp.shared_experts.down_proj.weight": [7168, 6144 // 8],
        "embed_tokens.weight": [163840 // 8, 7168],
    }
    assert {name: shard[name] for name in table} == table


def test_a_rank_takes_its_12_of_the_first_96_of_a_log(built: dict[str, Any]) -> None:
    first = 7 * HEADS // 8
    assert built["a_log_of_rank_7"] == [float(value) for value in range(first, first + 12)]
