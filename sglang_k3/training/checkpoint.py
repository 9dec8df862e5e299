"""The training form as a checkpoint in the real one's format, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_k3.kernels.mx.reference import dequantize_mxfp4, quantize_mxfp4
from sglang_k3.models.config import K3Config
from sglang_k3.models.names import canonical, expected_names
from sglang_k3.training.model import TrainingModel

_EXPERTS = ".experts."


def checkpoint_tensors(model: TrainingModel) -> dict[str, Tensor]:
    """Every tensor of the config's checkpoint, by its name there and in the dtype it has there.

    Routed experts are rounded to MXFP4 where the config stores them packed; A_log gets its padding.
    """
    own = model.state_dict()
    packed: dict[str, tuple[Tensor, Tensor]] = {}
    tensors = {}
    for spec in expected_names(model.config):
        name = canonical(spec.name)
        if _EXPERTS in name:
            matrix, part = name.rsplit(".", 1)
            value = _expert_matrix(own, matrix)
            if part != "weight":
                if matrix not in packed:
                    packed[matrix] = quantize_mxfp4(value)
                value = packed[matrix][part == "weight_scale"]
        elif name.endswith("A_log"):
            value = torch.zeros(spec.shape)
            value.flatten()[: model.config.kda.num_heads] = own[name]
        else:
            value = own[name]
        assert value.shape == spec.shape, f"{spec.name} is {tuple(value.shape)}, not {spec.shape}"
        tensors[spec.name] = value.to(spec.dtype).contiguous().clone()
    return tensors


def save_checkpoint(
    model: TrainingModel,
    raw_config: Mapping[str, Any],
    directory: Path,
    sampling: Mapping[str, float] | None = None,
) -> None:
    """Write config.json, generation_config.json and model.safetensors.

    raw_config: what the config.json is to hold; the model must have been made from it. sampling: what
    servers are to sample with by default, None for greedy decoding.
    """
    directory.mkdir(parents=True, exist_ok=True)
    ids = {key: raw_config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation = {**ids, "do_sample": sampling is not None, **(sampling or {})}
    for name, content in (("config", raw_config), ("generation_config", generation)):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    weights = directory / "model.safetensors"
    save_file(checkpoint_tensors(model), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # it is written for its owner alone


def load_checkpoint(directory: Path) -> TrainingModel:
    """The training form of a checkpoint, experts unpacked. Raises KeyError for a lacking tensor."""
    config = K3Config.from_hf(json.loads((directory / "config.json").read_text()))
    stored = {
        canonical(name): tensor
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    model = TrainingModel(config)
    state = {}
    for name, own in model.state_dict().items():
        if _EXPERTS in name:
            stem, _, which = name.rpartition(".")
            matrices = [_unpacked(stored, f"{stem}.{e}.{which}") for e in range(len(own))]
            state[name] = torch.stack(matrices)
        elif name.endswith("A_log"):
            state[name] = stored[name].flatten()[: config.kda.num_heads].float()
        else:
            state[name] = stored[name].float()
    model.load_state_dict(state)
    return model


def _expert_matrix(own: Mapping[str, Tensor], matrix: str) -> Tensor:
    """ "...experts.3.w1" -> row 3 of the stack "...experts.w1"."""
    stem, expert, which = matrix.rsplit(".", 2)
    return own[f"{stem}.{which}"][int(expert)]


def _unpacked(stored: Mapping[str, Tensor], matrix: str) -> Tensor:
    if f"{matrix}.weight" in stored:
        return stored[f"{matrix}.weight"].float()
    return dequantize_mxfp4(
        stored[f"{matrix}.weight_packed"], stored[f"{matrix}.weight_scale"], torch.float32
    )
