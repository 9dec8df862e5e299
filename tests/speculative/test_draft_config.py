"""Every field of a draft's config is used, checked, or known to change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_k3.models.config import ConfigError
from sglang_k3.models.dspark_config import DraftConfig
from sglang_k3.testing.random_draft import draft_config

OTHER_ROPE = {"rope_type": "default", "rope_theta": 5.0}
TARGET = {"hidden_size": 64, "vocab_size": 512, "num_layers": 5, "max_positions": 1024}


def config(**changes: Any) -> dict[str, Any]:
    made = draft_config(
        hidden_size=64, vocab_size=512, target_layers=5, taps=[0, 2, 4], mask_token=9, max_positions=2048
    )
    return made | changes


def nested(**changes: Any) -> dict[str, Any]:
    return config(dflash_config=config()["dflash_config"] | changes)


def test_a_plain_config_is_read():
    read = DraftConfig.from_file(config())
    assert (read.gamma, read.taps, read.mask_token, read.mixture, read.causal) == (
        7,
        (0, 2, 4),
        9,
        True,
        False,
    )
    read.check_target(**TARGET)


@pytest.mark.parametrize(
    "changed, field, value",
    [
        (config(num_hidden_layers=3), "num_layers", 3),
        (config(num_attention_heads=8), "num_heads", 8),
        (config(num_key_value_heads=1), "num_kv_heads", 1),
        (config(head_dim=16), "head_dim", 16),
        (config(intermediate_size=99), "intermediate_size", 99),
        (config(rms_norm_eps=1e-3), "eps", 1e-3),
        (config(block_size=4), "gamma", 4),
        (config(markov_rank=8), "markov_rank", 8),
        (config(enable_confidence_head=False), "confidence", False),
        (config(confidence_head_with_markov=False), "confidence_with_markov", False),
        (config(is_causal=True), "causal", True),
        (config(max_position_embeddings=4096), "max_positions", 4096),
        (config(rope_parameters=OTHER_ROPE), "rope", OTHER_ROPE),
        (nested(mask_token_id=3), "mask_token", 3),
        (nested(target_layer_ids=[1, 3]), "taps", (1, 3)),
        (nested(aux_hidden_stream="prefix"), "mixture", False),
        (nested(target_layer_offset=-1, target_layer_ids=[1]), "tapped_layers", (0,)),
    ],
)
def test_each_field_is_heard(changed, field, value):
    plain = DraftConfig.from_file(config())
    read = DraftConfig.from_file(changed)
    assert getattr(read, field) == value != getattr(plain, field)


@pytest.mark.parametrize(
    "changed, says",
    [
        (config(hidden_act="gelu"), "hidden_act 'gelu'"),
        (config(attention_bias=True), "attention_bias True"),
        (config(sliding_window=2048), "sliding_window 2048"),
        (config(use_sliding_window=True), "use_sliding_window True"),
        (config(markov_head_type="gated"), "markov_head_type 'gated'"),
        (config(tie_word_embeddings=True), "tie_word_embeddings True"),
        (config(sample_from_anchor=False), "sample_from_anchor False"),
        (config(layer_types=["sliding_attention", "full_attention"]), "sliding_attention"),
        (config(quantization_config={"quant_method": "fp8"}), "quantization_config"),
        (config(brand_new_field=1), "unknown field brand_new_field = 1"),
        (nested(brand_new_field=1), "unknown field dflash_config.brand_new_field = 1"),
        (nested(aux_hidden_stream="both"), "aux_hidden_stream 'both'"),
        (nested(mask_token_id=512), "mask_token_id 512 is outside"),
        (config(num_key_value_heads=3), "not a multiple"),
        (config(head_dim=7), "head_dim 7 is odd"),
        (config(block_size=0), "gamma 0"),
        (config(markov_rank=0), "markov_rank 0"),
        (config(rope_parameters={"rope_type": "longrope", "rope_theta": 1.0}), "longrope"),
        (config(rope_parameters={"rope_type": "default"}), "no rope_theta"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changed, says):
    with pytest.raises(ConfigError, match=says):
        DraftConfig.from_file(changed)


@pytest.mark.parametrize(
    "lacking", ["hidden_size", "block_size", "num_target_layers", "markov_rank", "vocab_size"]
)
def test_a_lacking_field_is_named(lacking):
    values = config()
    del values[lacking]
    with pytest.raises(ConfigError, match=f"lacks {lacking}"):
        DraftConfig.from_file(values)


@pytest.mark.parametrize("lacking", ["mask_token_id", "target_layer_ids"])
def test_a_lacking_nested_field_is_named(lacking):
    values = config()
    values["dflash_config"] = {k: v for k, v in values["dflash_config"].items() if k != lacking}
    with pytest.raises(ConfigError, match=f"lacks dflash_config.{lacking}"):
        DraftConfig.from_file(values)


@pytest.mark.parametrize(
    "target, says",
    [
        ({"hidden_size": 128}, "hidden_size 64, this one has 128"),
        ({"vocab_size": 513}, "vocab_size 512, this one has 513"),
        ({"num_layers": 6}, "5, this one has 6"),
        ({"max_positions": 4096}, "--context-length 2048"),
    ],
)
def test_another_target_is_refused_with_both_values(target, says):
    with pytest.raises(ConfigError, match=says):
        DraftConfig.from_file(config()).check_target(**TARGET | target)


@pytest.mark.parametrize("taps", [[0, 5], [-1, 2], [2, 2]])
def test_taps_outside_the_target_or_twice_are_refused(taps):
    with pytest.raises(ConfigError, match="taps layers"):
        DraftConfig.from_file(nested(target_layer_ids=taps)).check_target(**TARGET)


def test_older_rope_fields_are_read_too():
    values = config(
        rope_theta=7.0, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    )
    del values["rope_parameters"]
    rope = DraftConfig.from_file(values).rope
    assert rope["rope_type"] == "yarn" and rope["rope_theta"] == 7.0 and rope["factor"] == 4.0
