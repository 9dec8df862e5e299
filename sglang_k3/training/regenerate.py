"""Text in the target's own words: what a draft has to foresee is the target, not the corpus.

Prompts are pieces of the corpus; the served target continues each greedily and by sampling. The target's
hidden states at the tapped layers and its distributions then come from the training form of the same
checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sglang_k3.testing.repetition import before_repetition
from sglang_k3.training.data import functions
from sglang_k3.training.dataset import SEPARATOR
from sglang_k3.training.model import Bank, TrainingModel, mix

LONGEST_PROMPT = 160
NEW_TOKENS = 128
_BATCH = 256


@dataclass(frozen=True)
class Sample:
    """tokens [T] of prompt and continuation; written: where the continuation starts."""

    tokens: list[int]
    written: int


def prompts(texts: Sequence[str], tokenizer: Tokenizer, count: int, seed: int) -> list[list[int]]:
    """Function heads, and files and functions cut anywhere, each behind the separator of documents."""
    rng = random.Random(seed)
    heads = [function for text in texts for function in functions(text)]
    found: list[list[int]] = []
    while len(found) < count:
        kind = rng.random()
        if kind < 0.4:
            text = rng.choice(heads).head
        elif kind < 0.7:
            function = rng.choice(heads)
            whole = function.head + function.body
            text = whole[: rng.randrange(len(function.head), len(whole) + 1)]
        else:
            file = rng.choice(texts)
            start = file.rfind("\n", 0, rng.randrange(len(file) + 1)) + 1
            text = file[start : start + rng.randrange(40, 600)]
        tokens = tokenizer.encode(text).ids[-LONGEST_PROMPT:]
        if tokens:
            found.append([SEPARATOR, *tokens])
    return found


def continued(
    model: Path, starts: list[list[int]], sampling: dict[str, Any], on_progress: Any
) -> list[Sample]:
    """Each prompt with the served target's continuation, cut where it starts to repeat itself.

    on_progress(done, total) is called after every batch.
    """
    import sglang

    engine = sglang.Engine(
        model_path=str(model),
        device="cpu",
        dtype="bfloat16",
        page_size=16,
        max_running_requests=32,
        max_mamba_cache_size=192,
        max_total_tokens=32768,
        disable_radix_cache=True,
        log_level="error",
    )
    samples = []
    try:
        for first in range(0, len(starts), _BATCH):
            batch = starts[first : first + _BATCH]
            outputs = engine.generate(
                input_ids=batch,
                sampling_params={"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **sampling},
            )
            for start, output in zip(batch, outputs, strict=True):
                new = output["output_ids"]
                samples.append(Sample([*start, *new[: before_repetition(new)]], len(start)))
            on_progress(len(samples), len(starts))
    finally:
        engine.shutdown()
    return samples


@torch.no_grad()
def tapped(
    model: TrainingModel, tokens: Tensor, layers: Sequence[int], mixture: bool
) -> tuple[Tensor, Tensor]:
    """tokens [B, T] -> the stream behind each of `layers` [B, T, len(layers) * D] (as the next layer's
    attention reads it, or the running sum), and what lm_head reads [B, T, D].
    """
    trunk = model.model
    stream = trunk.embed_tokens(tokens)
    bank: Bank = []
    found: dict[int, Tensor] = {}
    for index, layer in enumerate(trunk.layers):
        stream, bank = layer(stream, bank)
        if index in layers:
            reader: Any = trunk.layers[index + 1] if index + 1 < len(trunk.layers) else None
            norm = trunk.output_attn_res_norm if reader is None else reader.self_attention_res_norm
            query = trunk.output_attn_res_proj if reader is None else reader.self_attention_res_proj
            found[index] = mix(stream, bank, norm, query) if mixture else stream
    last = mix(stream, bank, trunk.output_attn_res_norm, trunk.output_attn_res_proj)
    return torch.cat([found[layer] for layer in layers], -1), trunk.norm(last)
