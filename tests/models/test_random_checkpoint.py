"""Random checkpoints: real names, one seed one file, and weights that make a lively model."""

from __future__ import annotations

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, KimiLinearForCausalLM, Qwen3ForCausalLM

from sglang_k3.models.config import K3Config
from sglang_k3.models.names import expected_names
from sglang_k3.models.reference import ReferenceModel, Trace, top2_gap, unpack_mxfp4
from sglang_k3.testing.byte_tokenizer import SPECIAL_TOKENS, save_tokenizer
from sglang_k3.testing.random_checkpoint import PRESETS, make

SHORT = {
    "num_hidden_layers": 2,
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 4,
        "head_dim": 64,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    },
}


def config_of(directory: Path) -> K3Config:
    return K3Config.from_hf(json.loads((directory / "config.json").read_text()))


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def prompt(length: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("k3", tmp_path_factory.mktemp("k3"))


@pytest.fixture(scope="module")
def forward(k3: Path) -> tuple[ReferenceModel, torch.Tensor, Trace]:
    """The model, its logits on 300 tokens, and what happened inside."""
    model, trace = ReferenceModel.from_checkpoint(k3), Trace()
    return model, model.forward(prompt(300), trace=trace), trace


def test_k3_holds_every_kind_of_layer(k3: Path):
    config = config_of(k3)
    assert config.kda_layers == (0, 1, 2, 4, 5, 6, 8, 9, 10)
    assert config.mla_layers == (3, 7, 11, 12)
    assert config.moe_layers == tuple(range(1, 13))
    assert config.block_starts == (0, 4, 8, 12)
    assert config.mla.kv_lora_rank != config.mla.qk_nope_head_dim
    assert weights_of(k3)["language_model.model.layers.0.self_attn.A_log"].shape == (128,)


@pytest.mark.parametrize("experts", ["dense", "mxfp4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_k3_has_exactly_the_tensors_of_its_config(dtype: str, experts: str, tmp_path: Path):
    directory = make("k3", tmp_path, dtype=dtype, experts=experts, text_config=SHORT)  # type: ignore[arg-type]
    expected = {tensor.name: (tensor.shape, tensor.dtype) for tensor in expected_names(config_of(directory))}
    stored = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights_of(directory).items()}
    assert stored == expected
    assert stored["language_model.model.layers.0.self_attn.dt_bias"][1] is torch.float32
    assert any(name.endswith("w2.weight_packed") for name in stored) == (experts == "mxfp4")


def test_packed_and_dense_experts_hold_the_same_values(tmp_path: Path):
    packed = weights_of(make("k3", tmp_path / "packed", experts="mxfp4", text_config=SHORT))
    dense = weights_of(make("k3", tmp_path / "dense", experts="dense", text_config=SHORT))
    at = "language_model.model.layers.1.block_sparse_moe.experts.3.w1"
    values = unpack_mxfp4(packed[f"{at}.weight_packed"], packed[f"{at}.weight_scale"], torch.float32)
    assert torch.equal(values, dense[f"{at}.weight"])
    assert values.unique().numel() > 15
    norm = "language_model.model.norm.weight"
    assert torch.equal(packed[norm], dense[norm])


def test_a_seed_gives_one_file_and_another_seed_another(tmp_path: Path):
    digests = [
        sha256((make("k3", tmp_path / name, seed=seed, text_config=SHORT) / "model.safetensors").read_bytes())
        for name, seed in (("first", 7), ("again", 7), ("other", 8))
    ]
    first, again, other = (digest.hexdigest() for digest in digests)
    assert first == again
    assert first != other


def test_bfloat16_weights_are_the_rounded_float32_ones(tmp_path: Path):
    full = weights_of(make("k3", tmp_path / "full", text_config=SHORT))
    half = weights_of(make("k3", tmp_path / "half", dtype="bfloat16", text_config=SHORT))
    assert full.keys() == half.keys()
    for name, tensor in full.items():
        assert torch.equal(tensor.to(half[name].dtype), half[name]), name


def test_activations_stay_of_order_one(forward: tuple[ReferenceModel, torch.Tensor, Trace]):
    _, _, trace = forward
    for tensor in trace.mixtures + trace.sums:
        assert 0.3 < tensor.square().mean().sqrt() < 4.0


def test_logits_spread_over_several_units(forward: tuple[ReferenceModel, torch.Tensor, Trace]):
    _, logits, _ = forward
    assert 2.0 < logits.std(-1).mean() < 5.0
    assert top2_gap(logits).median() > 0.3
    assert logits.argmax(-1).unique().numel() > 100


def test_router_choices_vary(forward: tuple[ReferenceModel, torch.Tensor, Trace]):
    _, _, trace = forward
    assert len(trace.experts) == 12
    for chosen in trace.experts.values():
        assert chosen.unique().numel() == 16
        assert len({tuple(row) for row in chosen.tolist()}) > 100


def test_decays_span_short_and_long_memory(forward: tuple[ReferenceModel, torch.Tensor, Trace]):
    model, _, trace = forward
    weights, at = model.tensors, "model.layers.5.self_attn."
    x = model._norm(trace.mixtures[5], "model.layers.5.input_layernorm")
    f = x @ weights[f"{at}f_a_proj.weight"].T @ weights[f"{at}f_b_proj.weight"].T + weights[f"{at}dt_bias"]
    rate = weights[f"{at}A_log"][:4].exp().repeat_interleave(64)
    log_decay = -5 * torch.sigmoid(rate * f)
    assert log_decay.quantile(0.1) < -1.0
    assert log_decay.quantile(0.9) > -0.02


def test_the_first_token_still_matters_after_300(forward: tuple[ReferenceModel, torch.Tensor, Trace]):
    model, logits, _ = forward
    changed = prompt(300)
    changed[0] = (changed[0] + 1) % 256
    assert (model.forward(changed)[-1] - logits[-1]).abs().max() > 0.02


@pytest.mark.parametrize("silent", ["self_attn.o_proj", "routed_expert_up_proj", "shared_experts.down_proj"])
def test_no_branch_is_idle(silent: str, forward: tuple[ReferenceModel, torch.Tensor, Trace]):
    """A branch cut out of one middle layer moves the logits far beyond any tolerance."""
    model, logits, _ = forward
    name = next(name for name in model.tensors if f"layers.6.{silent}" in name.replace("mlp.", ""))
    cut = ReferenceModel(model.config, {**model.tensors, name: torch.zeros_like(model.tensors[name])})
    assert (cut.forward(prompt(300)) - logits).abs().max() > 0.1


def test_both_dialects_and_qwen3_open_in_transformers(tmp_path: Path):
    for preset, kind in (("kimi-linear-transformers", KimiLinearForCausalLM), ("qwen3", Qwen3ForCausalLM)):
        directory = make(preset, tmp_path / preset)
        loaded: Any = kind.from_pretrained(directory, output_loading_info=True)
        model, problems = loaded
        assert not any(problems[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.no_grad():
            logits = model(prompt(20)[None]).logits[0]
        assert 2.0 < logits.std(-1).mean() < 5.0


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_has_a_tokenizer_and_token_ids(preset: str, tmp_path: Path):
    directory = make(preset, tmp_path, text_config=SHORT if preset == "k3" else None)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    generation = json.loads((directory / "generation_config.json").read_text())
    assert tokenizer.convert_tokens_to_ids("<|end_of_msg|>") == generation["eos_token_id"] == 258
    assert tokenizer.bos_token_id == generation["bos_token_id"] == 256


def test_text_survives_the_byte_tokenizer(tmp_path: Path):
    save_tokenizer(tmp_path, 300)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    text = "Grüße, 你好\n\t {}"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    marked = tokenizer("<|open|>message<|sep|>hi<|end_of_msg|>")["input_ids"]
    assert tokenizer.decode(marked, skip_special_tokens=True) == "<|open|>message<|sep|>hi"
    assert [tokenizer.decode([token]) for token in range(256, 271)] == list(SPECIAL_TOKENS)
    assert len(tokenizer) == 300


def test_a_vocabulary_without_room_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="vocab_size=256 has no room"):
        save_tokenizer(tmp_path, 256)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "gpt"}, "unknown preset 'gpt'"),
        ({"preset": "k3", "dtype": "int8"}, "unknown dtype 'int8'"),
        ({"preset": "qwen3", "experts": "mxfp4"}, "no packed experts"),
    ],
)
def test_unknown_choices_are_refused(arguments: dict[str, str], message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        make(directory=tmp_path, **arguments)  # type: ignore[arg-type]


def test_the_command_writes_what_the_function_writes(tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "sglang_k3.testing.random_checkpoint",
        "kimi-linear",
        str(tmp_path / "cli"),
    ]
    subprocess.run([*command, "--seed", "5", "--dtype", "bfloat16"], check=True)
    expected = make("kimi-linear", tmp_path / "call", seed=5, dtype="bfloat16")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "cli" / name).read_bytes() == (expected / name).read_bytes(), name
