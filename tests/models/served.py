"""Our served model in SGLang's own model runner, sound and with one deliberate fault at a time.

    python -m tests.models.served CHECKPOINT PROMPTS OUTPUT [MUTATION ...]

PROMPTS: JSON list of token id lists, prefilled as one batch. OUTPUT: a safetensors file with the logits
[T, vocabulary] of each prompt under "NAME/INDEX", NAME being "sound" or one of the mutations asked for.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from sglang_k3.models.attention_residual import BankedStream
from sglang_k3.testing.runner import start
from tests.models import NEW_BOUND, SWAPPED_BETAS

Model = Any


@contextmanager
def _on_each(model: Model, kind: str, **changes: Callable[[Any], Any]) -> Iterator[None]:
    """Set attributes of every module whose class has this name; a change gets the module."""
    modules = [module for module in model.modules() if type(module).__name__ == kind]
    assert modules, f"the served model has no {kind}"
    with ExitStack() as stack:
        for module in modules:
            for name, change in changes.items():
                stack.enter_context(patch.object(module, name, change(module)))
        yield


@contextmanager
def _bank_keeps_the_mixture(model: Model) -> Iterator[None]:
    read, close = BankedStream.read, BankedStream.close_block
    latest: list[torch.Tensor] = []

    def remembering_read(stream, reader):
        latest[:] = [read(stream, reader)]
        return latest[0]

    def close_on_mixture(stream):
        stream.partial = latest[0]
        close(stream)

    with patch.multiple(BankedStream, read=remembering_read, close_block=close_on_mixture):
        yield


@contextmanager
def _swapped_betas(model: Model) -> Iterator[None]:
    with (
        _on_each(model, "DenseMLP", betas=lambda _: SWAPPED_BETAS),
        _on_each(model, "Experts", betas=lambda _: SWAPPED_BETAS),
    ):
        yield


def _norm_before_experts(moe: Any) -> Callable[[torch.Tensor], tuple[torch.Tensor, None]]:
    down, norm = moe.latent_down.forward, moe.latent_norm
    return lambda x: (norm(down(x)[0]), None)


@contextmanager
def _latent_norm_early(model: Model) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(_on_each(model, "LatentMoE", normed=lambda _: False))
        for moe in (module for module in model.modules() if type(module).__name__ == "LatentMoE"):
            stack.enter_context(patch.object(moe.latent_down, "forward", _norm_before_experts(moe)))
        yield


def _biased_weights(router: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    route = router.route

    def biased(logits, bias, *rest):
        _, ids = route(logits, bias, *rest)
        chosen = (torch.sigmoid(logits) + bias).gather(1, ids)
        return chosen / chosen.sum(-1, keepdim=True), ids

    return biased


def _silu_gate(attention: Any) -> Callable[..., torch.Tensor]:
    norm = attention.gated_norm
    return lambda o, gate, *rest: norm(o, gate, *rest) * gate


MUTATIONS: dict[str, Callable[[Model], AbstractContextManager[None]]] = {
    "bank_keeps_the_mixture": _bank_keeps_the_mixture,
    "situ_betas_swapped": _swapped_betas,
    "other_gate_bound": lambda model: _on_each(
        model, "RadixLinearAttention", lower_bound=lambda _: NEW_BOUND
    ),
    "mla_output_gate_left_out": lambda model: _on_each(model, "GatedMLA", gate=lambda _: lambda o, gate: o),
    "kda_output_gate_is_silu": lambda model: _on_each(model, "KDAAttention", gated_norm=_silu_gate),
    "latent_norm_before_experts": _latent_norm_early,
    "router_bias_in_weights": lambda model: _on_each(model, "Router", route=_biased_weights),
    "router_bias_not_in_choice": lambda model: _on_each(
        model,
        "Router",
        e_score_correction_bias=lambda router: torch.nn.Parameter(
            torch.zeros_like(router.e_score_correction_bias), requires_grad=False
        ),
    ),
}


FLAGS = ["--dtype", "float32", "--max-running-requests", "4", "--max-mamba-cache-size", "16"]
FLAGS += ["--max-total-tokens", "2048", "--disable-radix-cache"]


@torch.no_grad()
def logits(runner: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """[T, vocabulary] of each prompt, all prefilled in one batch."""
    from sglang.benchmark import one_batch

    model = runner.torch_runner.model
    hidden: list[torch.Tensor] = []
    hook = model.model.register_forward_hook(lambda module, inputs, output: hidden.append(output[0]))
    requests = one_batch.prepare_synthetic_inputs_for_latency_test(
        len(prompts), 0, [array("q", prompt) for prompt in prompts]
    )
    runner.extend(requests)
    hook.remove()
    runner.clear()
    rows = hidden[0] @ model.lm_head.weight[: model.text.vocab_size].T
    return list(rows.split([len(prompt) for prompt in prompts]))


def main(checkpoint: str, prompts: str, output: str, *mutations: str) -> None:
    runner = start(checkpoint, FLAGS)
    ids = json.loads(Path(prompts).read_text())
    answers: dict[str, torch.Tensor] = {}
    for name in ("sound", *mutations):
        with MUTATIONS[name](runner.torch_runner.model) if name in mutations else nullcontext():
            for index, rows in enumerate(logits(runner, ids)):
                answers[f"{name}/{index}"] = rows.contiguous()
    save_file(answers, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
