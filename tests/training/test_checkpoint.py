"""Export writes the real checkpoint's names, shapes and dtypes, and reading gives the model back."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from sglang_k3.kernels.mx.reference import dequantize_mxfp4, quantize_mxfp4
from sglang_k3.models.config import K3Config
from sglang_k3.models.names import expected_names
from sglang_k3.models.reference import ReferenceModel
from sglang_k3.training.checkpoint import load_checkpoint, save_checkpoint
from sglang_k3.training.model import TrainingModel
from sglang_k3.training.tiny import tiny_config


def _model() -> TrainingModel:
    model = TrainingModel(K3Config.from_hf(tiny_config()), seed=5)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(r.e_score_correction_bias for r in model.routers)]:
            tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
    return model


def test_tensors_are_the_configs_own(tmp_path: Path) -> None:
    save_checkpoint(_model(), tiny_config(), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    config = K3Config.from_hf(tiny_config())
    wanted = {spec.name: (spec.shape, spec.dtype) for spec in expected_names(config)}
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == wanted
    assert "language_model.model.layers.1.block_sparse_moe.experts.3.w1.weight_packed" in stored
    padded = stored["language_model.model.layers.0.self_attn.A_log"]
    assert padded.shape == (128,) and padded[:4].abs().min() > 0 and not padded[4:].any()


def test_reading_gives_the_rounded_model_back(tmp_path: Path) -> None:
    model = _model()
    save_checkpoint(model, tiny_config(), tmp_path)
    own, back = model.state_dict(), load_checkpoint(tmp_path).state_dict()
    assert own.keys() == back.keys()
    for name, tensor in own.items():
        if ".experts." in name:
            rounded = dequantize_mxfp4(*quantize_mxfp4(tensor.flatten(0, 1)), torch.float32)
            expected = rounded.view_as(tensor)
        elif name.endswith(("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "correction_bias")):
            expected = tensor
        else:
            expected = tensor.bfloat16().float()
        assert torch.equal(back[name], expected), name


def test_exported_model_and_reference_agree(tmp_path: Path) -> None:
    save_checkpoint(_model(), tiny_config(), tmp_path)
    tokens = torch.randint(2048, (70,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = load_checkpoint(tmp_path).logits(tokens[None])[0]
    expected = ReferenceModel.from_checkpoint(tmp_path, torch.float32).forward(tokens)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def test_config_has_every_feature_of_the_real_one() -> None:
    config = K3Config.from_hf(tiny_config())
    assert config.mla_layers[-2:] == (config.num_layers - 2, config.num_layers - 1)
    assert config.kda_layers[:3] == (0, 1, 2) and config.mla_layers[0] == 3
    assert len(config.block_starts) >= 3 and not config.is_moe(0) and config.is_moe(1)
    assert config.moe is not None and config.moe.packed and config.moe.latent_norm
    assert (config.moe.num_experts, config.moe.top_k, config.moe.num_shared_experts) == (16, 4, 1)
    assert config.kda.gate_lower_bound == -5.0 and config.kda.output_gate_rank is None
    assert config.mla.output_gate and config.mla.kv_lora_rank != config.mla.qk_nope_head_dim
    assert config.kda.head_dim == 64 and config.kda.num_heads % 4 == 0
    assert config.moe.intermediate_size % 128 == 0 and config.vocab_size % 256 == 0
    assert config.hidden_size % 64 == 0 and config.expert_size % 64 == 0 and config.max_positions == 16384
