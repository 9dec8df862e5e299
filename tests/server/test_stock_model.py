"""A model that is not ours runs as before: with our platform alone, and with platform and plugin."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_k3.testing.random_checkpoint import make
from tests.server.harness import Server

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def qwen3(checkpoints: Path) -> Path:
    return make("qwen3", checkpoints / "qwen3")


@pytest.fixture(scope="module")
def short_prompts() -> list[list[int]]:
    draw = random.Random(11)
    return [[draw.randrange(256) for _ in range(length)] for length in (1, 5, 64, 200)]


@pytest.fixture(scope="module")
def expected(qwen3: Path, short_prompts: list[list[int]]) -> list[tuple[int, ...]]:
    model: Any = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    outputs = []
    for prompt in short_prompts:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
        outputs.append(tuple(ids[0, len(prompt) :].tolist()))
    assert len(set(outputs)) == len(outputs)
    return outputs


@pytest.mark.parametrize(
    "plugins", [{"SGLANG_PLUGINS": "k3cpu"}, {}], ids=["platform alone", "platform and plugin"]
)
def test_greedy_tokens_are_those_of_transformers(
    plugins: dict[str, str],
    qwen3: Path,
    short_prompts: list[list[int]],
    expected: list[tuple[int, ...]],
    tmp_path: Path,
) -> None:
    flags = ("--dtype", "float32", "--max-total-tokens", "4096")
    with Server(qwen3, tmp_path / "log", *flags, env=plugins) as server:
        replies = server.generate_all(short_prompts, NEW_TOKENS, at_once=4)
        hooked = "rank 0 of 1: cores" in server.tail(1_000_000)
    assert [reply.ids for reply in replies] == expected
    assert hooked == (not plugins)
