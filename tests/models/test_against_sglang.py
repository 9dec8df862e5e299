"""Our two implementations of Kimi K3 against SGLang's own model class, on one random checkpoint in fp32.

The comparison is only worth something if it fails when a feature is wrong, so each feature of the model is
also broken on purpose, in the reference and in the served model, and must be noticed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_k3.models.reference import ReferenceModel
from sglang_k3.testing.random_checkpoint import make
from tests.environment import ROOT
from tests.models import NEW_BOUND, SWAPPED_BETAS
from tests.models.served import MUTATIONS as SERVED_MUTATIONS

TOLERANCE = 1e-3
NOTICED = 0.2
"""A fault must move some logit by this much, 200 times what sound models may differ by. The smallest of them,
the router's bias in the weights, moves one by about 0.7; the logits have a standard deviation of about 3."""
GENERATOR = torch.Generator().manual_seed(3)
PROMPTS: list[list[int]] = [
    torch.randint(512, (length,), generator=GENERATOR).tolist() for length in (1, 7, 24)
]
EACH_PROMPT = pytest.mark.parametrize("index", range(len(PROMPTS)), ids=lambda i: f"{len(PROMPTS[i])}_tokens")

Answers = dict[str, Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("k3", tmp_path_factory.mktemp("k3"))


def both_models(
    checkpoint: Path, prompts: list[list[int]], folder: Path, mutations: Iterable[str] = ()
) -> dict[str, Answers]:
    """The logits of tests.models.in_tree and tests.models.served, each from a process of its own.

    SGLang keeps one configuration a process, and its Triton kernels are interpreted in one of them only.
    """
    (folder / "prompts.json").write_text(json.dumps(prompts))
    runs = {
        "in_tree": ((), {"TRITON_INTERPRET": "1", "SGLANG_PLUGINS": "none"}),
        "served": (tuple(mutations), {}),
    }
    processes: dict[str, subprocess.Popen[str]] = {}
    for name, (faults, extra) in runs.items():
        arguments = (checkpoint, folder / "prompts.json", folder / f"{name}.safetensors", *faults)
        with (folder / f"{name}.log").open("w") as log:
            processes[name] = subprocess.Popen(
                [sys.executable, "-m", f"tests.models.{name}", *map(str, arguments)],
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env={**os.environ, "TORCHDYNAMO_DISABLE": "1", **extra},
            )
    try:
        for name, process in processes.items():
            assert process.wait(1200) == 0, (folder / f"{name}.log").read_text()[-4000:]
    finally:
        for process in processes.values():
            process.kill()
    return {name: load_file(folder / f"{name}.safetensors") for name in processes}


@pytest.fixture(scope="module")
def answers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    return both_models(checkpoint, PROMPTS, tmp_path_factory.mktemp("answers"), SERVED_MUTATIONS)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> ReferenceModel:
    return ReferenceModel.from_checkpoint(checkpoint)


def distance(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).abs().max())


@EACH_PROMPT
def test_reference_model_agrees_with_sglangs(
    answers: dict[str, Answers], reference: ReferenceModel, index: int
):
    expected = answers["in_tree"][str(index)]
    assert expected.std() > 1, "flat logits would agree whatever the layers do"
    assert distance(reference.forward(PROMPTS[index]), expected) < TOLERANCE


@EACH_PROMPT
def test_served_model_agrees_with_sglangs(answers: dict[str, Answers], index: int):
    expected = answers["in_tree"][str(index)]
    assert distance(answers["served"][f"sound/{index}"], expected) < TOLERANCE


@pytest.mark.parametrize("mutation", SERVED_MUTATIONS)
def test_fault_in_served_model_is_noticed(answers: dict[str, Answers], mutation: str):
    last = len(PROMPTS) - 1
    assert distance(answers["served"][f"{mutation}/{last}"], answers["in_tree"][str(last)]) > NOTICED


class BankKeepsTheMixture(ReferenceModel):
    """Banks what the layer's attention read, not the sum that was mixed."""

    def _mix(self, stream: Tensor, bank: list[Tensor], name: str) -> Tensor:
        mixed = super()._mix(stream, bank, name)
        *_, layer, which = name.split(".")
        if which == "self_attention_res" and self.config.starts_block(int(layer)):
            # The caller banks this very tensor next, and reads it no more.
            stream.copy_(mixed)
        return mixed


class KdaOutputGateIsSilu(ReferenceModel):
    def _linear(self, x: Tensor, name: str) -> Tensor:
        at, _, which = name.rpartition(".")
        if which == "o_proj" and f"{at}.A_log" in self.tensors:
            x = x * super()._linear(self.layer_input, f"{at}.g_proj")
        return super()._linear(x, name)

    def _kda(self, x: Tensor, at: str, state) -> Tensor:
        self.layer_input = x
        return super()._kda(x, at, state)


class LatentNormBeforeExperts(ReferenceModel):
    def _linear(self, x: Tensor, name: str) -> Tensor:
        out = super()._linear(x, name)
        if not name.endswith(".routed_expert_down_proj"):
            return out
        return super()._norm(out, name.replace("down_proj", "norm"))

    def _norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        return x if name.endswith(".routed_expert_norm") else super()._norm(x, name, eps)


class RouterBiasInWeights(ReferenceModel):
    def _route(self, x: Tensor, at: str) -> tuple[Tensor, Tensor, Tensor]:
        _, chosen, gap = super()._route(x, at)
        biased = (
            torch.sigmoid(self._linear(x, f"{at}gate")) + self.tensors[f"{at}gate.e_score_correction_bias"]
        )
        weights = biased.gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen, gap


class RouterBiasNotInChoice(ReferenceModel):
    def _route(self, x: Tensor, at: str) -> tuple[Tensor, Tensor, Tensor]:
        name = f"{at}gate.e_score_correction_bias"
        self.tensors[name] = torch.zeros_like(self.tensors[name])
        return super()._route(x, at)


def _other_config(
    **changes: Callable[[ReferenceModel], object],
) -> Callable[[ReferenceModel], ReferenceModel]:
    """The model under a config in which each named field is what its change makes of the sound model."""

    def build(sound: ReferenceModel) -> ReferenceModel:
        config = replace(sound.config, **{name: change(sound) for name, change in changes.items()})
        return ReferenceModel(config, sound.tensors, sound.dtype)

    return build


def _other_class(kind: type[ReferenceModel]) -> Callable[[ReferenceModel], ReferenceModel]:
    return lambda sound: kind(sound.config, sound.tensors, sound.dtype)


REFERENCE_MUTATIONS: dict[str, Callable[[ReferenceModel], ReferenceModel]] = {
    "bank_keeps_the_mixture": _other_class(BankKeepsTheMixture),
    "situ_betas_swapped": _other_config(
        situ_beta=lambda _: SWAPPED_BETAS[0], situ_linear_beta=lambda _: SWAPPED_BETAS[1]
    ),
    "other_gate_bound": _other_config(
        kda=lambda sound: replace(sound.config.kda, gate_lower_bound=NEW_BOUND)
    ),
    "mla_output_gate_left_out": _other_config(mla=lambda sound: replace(sound.config.mla, output_gate=False)),
    "kda_output_gate_is_silu": _other_class(KdaOutputGateIsSilu),
    "latent_norm_before_experts": _other_class(LatentNormBeforeExperts),
    "router_bias_in_weights": _other_class(RouterBiasInWeights),
    "router_bias_not_in_choice": _other_class(RouterBiasNotInChoice),
}


@pytest.mark.parametrize("mutation", REFERENCE_MUTATIONS)
def test_fault_in_reference_model_is_noticed(
    answers: dict[str, Answers], reference: ReferenceModel, mutation: str
):
    last = len(PROMPTS) - 1
    faulty = REFERENCE_MUTATIONS[mutation](reference)
    # SGLang's logits, and the served model with the very same fault: it is this fault that was noticed.
    assert distance(faulty.forward(PROMPTS[last]), answers["in_tree"][str(last)]) > NOTICED
    assert distance(faulty.forward(PROMPTS[last]), answers["served"][f"{mutation}/{last}"]) < 10 * TOLERANCE


def test_both_models_are_broken_in_the_same_ways():
    assert set(REFERENCE_MUTATIONS) == set(SERVED_MUTATIONS)


# All with routed_scaling_factor 1, K3's own: SGLang's torch experts leave it out.
OTHER_CHECKPOINTS: dict[str, dict[str, object]] = {
    "another_seed": {},
    "blocks_of_three": {"attn_res_block_size": 3},
    "no_latent_norm": {"latent_moe_use_norm": False},
    "no_mla_output_gate": {"mla_use_output_gate": False},
    "two_experts_a_token": {"num_experts_per_token": 2},
    "tight_situ": {"activation_situ_beta": 1.5, "activation_situ_linear_beta": 2.0},
}


@pytest.mark.verify
@pytest.mark.parametrize("name", OTHER_CHECKPOINTS)
def test_other_checkpoints_agree_with_sglangs(name: str, tmp_path: Path):
    """Longer prompts on models with other features, for more than the default's numbers to be right."""
    model = make("k3", tmp_path / "model", seed=7, text_config=OTHER_CHECKPOINTS[name])
    prompts = [torch.randint(512, (length,), generator=GENERATOR).tolist() for length in (2, 70)]
    answers = both_models(model, prompts, tmp_path)
    reference = ReferenceModel.from_checkpoint(model)
    for index, prompt in enumerate(prompts):
        expected = answers["in_tree"][str(index)]
        assert distance(reference.forward(prompt), expected) < TOLERANCE
        assert distance(answers["served"][f"sound/{index}"], expected) < TOLERANCE
