"""Writes the trained model's folder: checkpoint, tokenizer, and a model card with measured figures."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sglang_k3.models.config import K3Config
from sglang_k3.models.reference import ReferenceModel
from sglang_k3.training import tokenizer as bpe
from sglang_k3.training.checkpoint import load_checkpoint, save_checkpoint
from sglang_k3.training.completions import (
    COUNT,
    NEW_TOKENS,
    Completion,
    complete,
    function_heads,
    share_parsed,
)
from sglang_k3.training.data import Corpus
from sglang_k3.training.evaluate import Evaluation, evaluate, held_out_windows
from sglang_k3.training.generate import sampled_text
from sglang_k3.training.model import TrainingModel
from sglang_k3.training.tiny import SAMPLING, tiny_config

_SHOWN = 3
"""Completions in the model card."""


def export(
    model: TrainingModel,
    corpus: Corpus,
    work: Path,
    directory: Path,
    history: dict[str, Any],
    console: Console,
) -> None:
    """Write `directory`. work: the run's folder, whose tokenizer is taken over. history: the run's."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = bpe.load(work)
    bpe.save(tokenizer, directory)
    save_checkpoint(model, tiny_config(), directory, SAMPLING)
    held_out = held_out_windows(corpus.held_out, tokenizer)

    def completions(reference: ReferenceModel) -> list[Completion]:
        heads = function_heads(corpus.held_out)
        generator = torch.Generator().manual_seed(0)
        return complete(heads, lambda head: sampled_text(reference, tokenizer, head, NEW_TOKENS, generator))

    with console.status("Measuring on the held-out files before rounding ..."):
        model.round_experts(False)
        before = evaluate(model, held_out)
    with console.status("Measuring on the held-out files as exported ..."):
        after = evaluate(load_checkpoint(directory), held_out)
    with console.status("Completing held-out function heads ..."):
        trained = completions(ReferenceModel.from_checkpoint(directory, torch.float32))
        untrained = completions(_untrained(work))
    card = model_card(directory, history, corpus, held_out.bytes, before, after, trained, untrained)
    (directory / "README.md").write_text(card)
    console.print(
        f"{directory}: {before.bits_per_byte:.4f} bits per byte before and {after.bits_per_byte:.4f} after "
        f"rounding, {share_parsed(trained):.0%} of {COUNT} completions parse "
        f"(untrained {share_parsed(untrained):.0%}), {_size(directory) / 1e6:.1f} MB",
        soft_wrap=True,
    )


def _untrained(work: Path) -> ReferenceModel:
    """The model as it was before its first step."""
    folder = work / "untrained"
    save_checkpoint(TrainingModel(K3Config.from_hf(tiny_config())), tiny_config(), folder)
    reference = ReferenceModel.from_checkpoint(folder, torch.float32)
    shutil.rmtree(folder)
    return reference


def model_card(
    directory: Path,
    history: dict[str, Any],
    corpus: Corpus,
    held_out_bytes: int,
    before: Evaluation,
    after: Evaluation,
    trained: list[Completion],
    untrained: list[Completion],
) -> str:
    """The text of README.md; every figure in it was measured by this export."""
    config = K3Config.from_hf(tiny_config())
    assert config.moe is not None and config.residual_block_size is not None
    total, active = _parameters(config)
    training_bytes = sum(len(text.encode()) for text in corpus.training.values())
    kinds = " ".join("KDA" if config.is_kda(layer) else "MLA" for layer in range(config.num_layers))
    loss = _mean(history["losses"][-50:])
    change = after.bits_per_byte / before.bits_per_byte - 1
    shown = [completion for completion in trained if completion.parses][:_SHOWN]
    samples = "\n".join(f"```python\n{completion.code}```\n" for completion in shown)
    return f"""\
# tiny-k3

A small Kimi K3, trained from nothing on one CPU, with every structural feature of the real one and in its
checkpoint format. It writes text that looks like Python and knows nothing: it is for demos and tests.

Written by `python -m sglang_k3.training.train`, figures included.

| | |
| --- | --- |
| layers | {kinds}, residual blocks of {config.residual_block_size} layers |
| hidden size, heads | {config.hidden_size}, {config.kda.num_heads} of {config.kda.head_dim} |
| experts | {config.moe.num_experts} routed, {config.moe.top_k} a token, and {config.moe.num_shared_experts} \
shared; latent size {config.moe.latent_size}; first layer dense |
| parameters | {total / 1e6:.2f} M, {active / 1e6:.2f} M active for a token |
| vocabulary | {config.vocab_size}, byte-level BPE with K3's special tokens |
| positions | up to {config.max_positions}; trained on lengths up to 2,048 |
| storage | routed experts MXFP4, all else bf16 or fp32 as in K3; {_size(directory) / 1e6:.1f} MB |

## Training

{history["tokens"][-1] / 1e6:.2f} M tokens in {len(history["tokens"])} steps, {history["seconds"] / 60:.0f} \
minutes on two cores; last training loss {loss:.3f} nats a token (mean of 50 steps). Text: the sources of \
Python {platform.python_version()}'s standard library without its tests ({len(corpus.training)} files, \
{training_bytes / 1e6:.1f} MB), its functions on their own, and conversations made from them. Muon for \
matrices, AdamW for all else; the router's bias balances the experts without an auxiliary loss. In the last \
quarter the experts' weights were rounded to MXFP4 in every forward (quantisation in the loop, \
straight-through gradients).

![loss](../../docs/tiny-k3-loss.png)

Again (the seed is fixed; other thread counts and other Pythons give slightly other figures):

```
python -m sglang_k3.training.train --out examples/tiny-k3 --tokens {history["tokens"][-1]} --minutes 1000
```

`--minutes 40` bounds the time instead. The run lives in `.cache/tiny-k3` and goes on there after an
interruption.

## Measured on {len(corpus.held_out)} held-out files ({held_out_bytes / 1e3:.0f} kB)

| | before rounding (fp32) | as stored (MXFP4, bf16) |
| --- | --- | --- |
| bits per byte | {before.bits_per_byte:.4f} | {after.bits_per_byte:.4f} ({change:+.2%}) |
| loss, nats a token | {before.nats:.4f} | {after.nats:.4f} |

Loss by position in a window of 2,048 tokens, as stored:

| {" | ".join(f"{low}-{high - 1}" for low, high in after.by_position)} |
|{" --- |" * len(after.by_position)}
| {" | ".join(f"{value:.2f}" for value in after.by_position.values())} |

{share_parsed(trained):.0%} of {COUNT} completions ({NEW_TOKENS} tokens at temperature \
{SAMPLING["temperature"]}, top-p {SAMPLING["top_p"]}, the default in generation_config.json) of held-out
function heads are Python after cutting at the last full line; of the untrained model's, \
{share_parsed(untrained):.0%}. Greedy decoding soon repeats itself, as in any model of this size.

{samples}"""


def _parameters(config: K3Config) -> tuple[int, int]:
    """All parameters, and those that take part in one token (the embedding table does not)."""
    assert config.moe is not None
    total = active = 0
    for name, parameter in TrainingModel(config).named_parameters():
        total += parameter.numel()
        if ".experts." in name:
            active += parameter.numel() * config.moe.top_k // config.moe.num_experts
        elif not name.endswith("embed_tokens.weight"):
            active += parameter.numel()
    return total, active


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())
