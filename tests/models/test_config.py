"""Reading configs of the three dialects, and the classes SGLang gets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.kimi_linear import KimiLinearConfig
from transformers import KimiLinearConfig as TransformersConfig

from sglang_k3.models import hf_config
from sglang_k3.models.config import ConfigError, K3Config
from sglang_k3.models.hf_config import K3MultimodalConfig, K3TextConfig
from sglang_k3.models.presets import mxfp4_quantization, real_k3_config
from sglang_k3.testing.random_checkpoint import k3_config, kimi_linear_config
from sglang_k3.testing.transformers_checkpoint import kimi_linear_config as transformers_config


def write(raw: dict[str, Any], directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def test_published_k3_layers():
    config = K3Config.from_hf(real_k3_config())
    assert (config.num_layers, len(config.kda_layers), len(config.mla_layers)) == (93, 69, 24)
    assert config.mla_layers == (*range(3, 92, 4), 92)
    assert config.kda_layers[:4] == (0, 1, 2, 4)
    assert config.moe_layers == tuple(range(1, 93))
    assert config.is_kda(0) and not config.is_moe(0)
    assert not config.is_kda(91) and not config.is_kda(92)


def test_published_k3_residual_blocks():
    config = K3Config.from_hf(real_k3_config())
    assert config.block_starts == (0, 12, 24, 36, 48, 60, 72, 84)
    assert [config.bank_rows(layer) for layer in (0, 1, 12, 13, 24, 92, 93)] == [0, 1, 1, 2, 2, 8, 8]


def test_published_k3_sizes_and_options():
    config = K3Config.from_hf(real_k3_config())
    assert config.name_prefix == "language_model."
    assert config.dtype is torch.bfloat16
    assert (config.activation, config.situ_beta, config.situ_linear_beta) == ("situ", 4.0, 25.0)
    assert (config.kda.projection_size, config.kda.gate_lower_bound) == (12288, -5.0)
    assert config.kda.output_gate_rank is None
    assert (config.mla.qk_head_dim, config.mla.output_gate) == (192, True)
    assert config.mla.scale == pytest.approx(0.0721688, abs=1e-7)
    assert config.moe is not None
    assert (config.moe.latent_size, config.expert_size, config.moe.latent_norm) == (3584, 3584, True)
    assert (config.moe.shared_intermediate_size, config.moe.packed) == (6144, True)
    assert config.vision is not None and config.vision.merged_size == 4096


def test_kimi_linear_has_a_classic_stream_and_low_rank_gates():
    config = K3Config.from_hf(kimi_linear_config("float32", {}))
    assert config.activation == "silu"
    assert config.residual_block_size is None and config.block_starts == ()
    assert config.bank_rows(3) == 0
    assert (config.kda.gate_lower_bound, config.kda.output_gate_rank) == (None, 64)
    assert not config.mla.output_gate
    assert config.moe is not None and config.moe.latent_size is None
    assert config.expert_size == config.hidden_size


def test_the_two_dialects_of_kimi_linear_describe_one_model():
    original = K3Config.from_hf(kimi_linear_config("float32", {}))
    ported = K3Config.from_hf(transformers_config("float32", {}))
    assert ported.dialect == "transformers"
    # That implementation builds the latent norms with an eps of its own.
    mla = replace(ported.mla, q_norm_eps=1e-5, kv_norm_eps=1e-5)
    assert replace(ported, dialect="original", mla=mla) == original


def test_eps_of_the_latent_norms():
    k3 = K3Config.from_hf(k3_config("float32", "dense", {}))
    assert (k3.mla.q_norm_eps, k3.mla.kv_norm_eps) == (1e-5, 1e-5)
    ported = K3Config.from_hf(transformers_config("float32", {}))
    assert ported.mla.kv_norm_eps == 1e-6
    chosen = K3Config.from_hf(
        k3_config("float32", "dense", {"q_a_layernorm_eps": 1e-6, "kv_a_layernorm_eps": 3e-6})
    )
    assert (chosen.mla.q_norm_eps, chosen.mla.kv_norm_eps) == (1e-6, 3e-6)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (kimi_linear_config("bfloat16", {}), K3TextConfig),
        (transformers_config("bfloat16", {}), K3TextConfig),
        (transformers_config("bfloat16", {}), TransformersConfig),
        (real_k3_config(), K3MultimodalConfig),
    ],
)
def test_an_object_reads_like_its_file(raw: dict[str, Any], kind: type, tmp_path: Path):
    loaded = kind.from_pretrained(write(raw, tmp_path))
    assert K3Config.from_hf(loaded) == K3Config.from_hf(raw)


def test_the_text_config_alone_gives_the_text_model_of_the_whole(tmp_path: Path):
    whole = K3MultimodalConfig.from_pretrained(write(real_k3_config(), tmp_path))
    config = K3Config.from_hf(whole)
    text = K3Config.from_hf(whole.text_config)
    assert replace(text, dialect="k3", name_prefix="language_model.", vision=config.vision) == config


def linear(**changes: Any) -> dict[str, Any]:
    stock = {"full_attn_layers": [4], "kda_layers": [1, 2, 3, 5], "num_heads": 3, "head_dim": 64}
    return {"linear_attn_config": {**stock, **changes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (linear(kda_layers=[], full_attn_layers=[1, 2, 3, 4, 5]), "without a KDA layer"),
        ({"linear_attn_config": None}, "without a KDA layer"),
        (linear(kda_layers=[1, 2, 3, 4, 5]), r"\[4\].*named twice"),
        (linear(kda_layers=[1, 2, 5]), r"\[3\].*missing"),
        (linear(kda_layers=[1, 2, 3, 5, 6]), r"\[6\].*outside.*1 to num_hidden_layers=5"),
        (linear(kda_layers=[0, 1, 2, 3, 5]), r"\[0\].*outside"),
        ({"layer_types": ["linear_attention"] * 5}, "layer_types says.*remove one"),
        ({"layer_types": ["sliding_attention"] * 5}, "'sliding_attention'"),
        ({"layer_types": ["linear_attention"] * 4}, "4 entries for num_hidden_layers=5"),
        (linear(gate_lower_bound=-8.0), r"gate_lower_bound=-8.0 is not in \[-5, 0\)"),
        (linear(gate_lower_bound=0.0), "gate_lower_bound=0.0"),
        (linear(short_conv_kernel_size=1), "at least 2 taps"),
        (linear(num_heads=0), "num_heads=0 is not a positive integer"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*'situ'"),
        ({"hidden_act": "situ"}, "no 'activation_situ_beta'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 differs from num_attention_heads=4"),
        ({"mla_use_nope": False}, "mla_use_nope=False"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"moe_router_activation_func": "relu"}, "moe_router_activation_func='relu'"),
        ({"num_experts_per_token": 9}, "num_experts_per_token=9 is more than num_experts=8"),
        ({"num_expert_group": 3}, "num_expert_group=3"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"kv_lora_rank": None}, "no 'kv_lora_rank'"),
        ({"hidden_size": "192"}, "hidden_size='192' is not a positive integer"),
        ({"dtype": "float8"}, "dtype='float8'"),
        ({"quantization_config": {"quant_method": "awq"}}, "format 'awq'"),
        ({"quantization_config": mxfp4_quantization(), "moe_intermediate_size": 100}, "multiples of 32"),
    ],
)
def test_an_impossible_config_is_refused_with_its_value(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        K3Config.from_hf(kimi_linear_config("float32", changes))


def test_other_group_sizes_are_refused():
    quantization = mxfp4_quantization()
    quantization["config_groups"]["group_0"]["weights"]["group_size"] = 16
    with pytest.raises(ConfigError, match="group_size=16"):
        K3Config.from_hf(kimi_linear_config("float32", {"quantization_config": quantization}))


def test_moe_layers_follow_frequency_and_dense_start():
    raw = kimi_linear_config("float32", {"first_k_dense_replace": 2, "moe_layer_freq": 2})
    assert K3Config.from_hf(raw).moe_layers == (2, 4)
    types = transformers_config(
        "float32", {"mlp_layer_types": ["sparse", "dense", "sparse", "dense", "dense"]}
    )
    assert K3Config.from_hf(types).moe_layers == (0, 2)


def test_a_transformers_file_keeps_its_kda_layers_in_sglang(tmp_path: Path):
    directory = write(transformers_config("bfloat16", {}), tmp_path)
    ours = K3TextConfig.from_pretrained(directory)
    assert ours.linear_layer_ids == [0, 1, 2, 4]
    assert ours.full_attention_layer_ids == [3]
    assert (ours.linear_attn_config or {})["num_heads"] == 3
    assert ours.first_k_dense_replace == 1
    # What SGLang's own class makes of the file, and the reason for ours.
    assert KimiLinearConfig.from_pretrained(directory).linear_layer_ids == []


def test_sglang_gets_no_config_without_a_kda_layer(tmp_path: Path):
    raw = real_k3_config()
    raw["text_config"]["linear_attn_config"]["kda_layers"] = []
    with pytest.raises(ConfigError, match="missing from linear_attn_config"):
        K3MultimodalConfig.from_pretrained(write(raw, tmp_path))


@pytest.mark.parametrize(
    ("flag", "window"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("auto", torch.bfloat16)],
)
def test_the_convolution_window_has_the_dtype_of_the_model(
    flag: str, window: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hf_config, "get_model", lambda: SimpleNamespace(dtype=flag))
    monkeypatch.setattr(hf_config, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1))
    parameters = K3TextConfig(**kimi_linear_config("bfloat16", {})).mamba2_cache_params
    assert parameters.dtype.conv is window
    assert parameters.dtype.temporal is torch.float32
    assert parameters.layers == [0, 1, 2, 4]
    assert parameters.shape.conv == [(3, 3 * 3 * 64)]
    assert parameters.shape.temporal == (3, 64, 64)
