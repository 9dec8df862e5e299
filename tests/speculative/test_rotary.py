"""Rotary embedding against transformers' own, plain and YaRN."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from sglang_k3.models.dspark_config import DraftConfig
from sglang_k3.models.rotary import Rotary
from sglang_k3.testing.random_draft import draft_config

ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
}


def drafts_rotary(rope):
    made = draft_config(
        hidden_size=64,
        vocab_size=64,
        target_layers=1,
        taps=[0],
        mask_token=1,
        max_positions=1024,
        rope_parameters=rope,
    )
    return Rotary(DraftConfig.from_file(made))


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rows_are_turned_as_transformers_turns_them(rope):
    config = Qwen3Config(
        head_dim=32,
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=1024,
        rope_parameters=dict(rope),
    )
    x = torch.randn(6, 3, 32, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 5, 63, 64, 1000])
    cos, sin = Qwen3RotaryEmbedding(config)(x, positions.unsqueeze(0))
    want, _ = apply_rotary_pos_emb(x.transpose(0, 1).unsqueeze(0), x.transpose(0, 1).unsqueeze(0), cos, sin)
    got = drafts_rotary(rope)(x, positions)
    torch.testing.assert_close(got, want[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_yarn_scales_by_its_attention_factor():
    # 0.1 ln 16 + 1
    assert drafts_rotary(ROPES["yarn"]).cos[0, 0].item() == pytest.approx(1.27726, abs=1e-5)
    assert drafts_rotary(ROPES["plain"]).cos[0, 0].item() == 1.0


def test_bf16_rows_come_back_as_bf16():
    x = torch.randn(2, 1, 32).bfloat16()
    assert drafts_rotary(ROPES["plain"])(x, torch.tensor([3, 4])).dtype == torch.bfloat16
