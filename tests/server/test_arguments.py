"""Flags that cannot work are refused when arguments are resolved, with the remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_k3.testing.random_checkpoint import make

# Resolves each argument list in one process (importing SGLang takes longer than all of them) and
# prints, as JSON, what each ended in.
RESOLVER = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import prepare_server_args
results = []
for arguments in json.load(sys.stdin):
    try:
        server_args = prepare_server_args(arguments)
        server_args.resolve_once()
        results.append(["ok", resolving_view(server_args).attention_backend])
    except (ValueError, AssertionError) as error:
        results.append(["refused", str(error)])
print("RESULTS" + json.dumps(results))
"""

EXACT = ("--enable-deterministic-inference",)
# Flags, on which checkpoint, and what the refusal must contain.
REFUSED: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (("--attention-backend", "torch_native"), "k3", ("--attention-backend torch_native", "k3_cpu")),
    (("--decode-attention-backend", "torch_native"), "k3", ("--decode-attention-backend",)),
    (("--attention-backend", "k3_cpu"), "qwen3", ("--attention-backend k3_cpu", "torch_native")),
    (("--enable-hierarchical-cache",), "k3", ("--enable-hierarchical-cache", "are one")),
    (("--enable-hierarchical-cache",), "qwen3", ("--enable-hierarchical-cache", "are one")),
    ((*EXACT, "--dtype", "bfloat16"), "k3", ("bfloat16", "--dtype float32")),
    ((*EXACT, "--dtype", "float32", "--mamba-ssm-dtype", "bfloat16"), "k3", ("--mamba-ssm-dtype",)),
    (EXACT, "qwen3", ("deterministic inference", "torch_native")),
    (("--enable-linear-replayssm",), "k3", ("--enable-linear-replayssm",)),
    (("--kv-cache-dtype", "fp8_e4m3"), "k3", ("--kv-cache-dtype fp8_e4m3",)),
    (("--pp-size", "2"), "k3", ("--pp-size 2", "--tp-size")),
    (("--speculative-algorithm", "NGRAM"), "k3", ("speculative",)),
    ((), "vision", ("language_model_only",)),
    ((), "k3", ("float16", "--dtype float32")),
)
ACCEPTED: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("--dtype", "float32"), "k3", "k3_cpu"),
    (("--attention-backend", "k3_cpu", "--dtype", "bfloat16"), "k3", "k3_cpu"),
    ((*EXACT, "--dtype", "float32"), "k3", "k3_cpu"),
    ((), "qwen3", "torch_native"),
)


@pytest.fixture(scope="module")
def models(checkpoints: Path) -> dict[str, Path]:
    made = {
        "k3": make("k3", checkpoints / "arguments_k3"),
        "qwen3": make("qwen3", checkpoints / "arguments_qwen3"),
        "vision": make("k3", checkpoints / "arguments_vision"),
    }
    config = made["vision"] / "config.json"
    values = json.loads(config.read_text())
    del values["language_model_only"]
    config.write_text(json.dumps(values))
    return made


def resolve(cases: list[list[str]], env: dict[str, str] | None = None) -> list[tuple[str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", RESOLVER],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **(env or {})},
    )
    assert "RESULTS" in done.stdout, done.stderr[-3000:]
    return [tuple(result) for result in json.loads(done.stdout.rpartition("RESULTS")[2])]


def arguments(model: Path, flags: tuple[str, ...]) -> list[str]:
    return ["--model-path", str(model), "--device", "cpu", *flags]


def test_each_flag_that_cannot_work_is_refused_by_name(models: dict[str, Path]) -> None:
    results = resolve([arguments(models[model], flags) for flags, model, _ in REFUSED])
    for (flags, model, parts), (outcome, message) in zip(REFUSED, results, strict=True):
        assert outcome == "refused", f"{flags} on {model}: {outcome} {message}"
        for part in parts:
            assert part in message, f"{flags} on {model}: {message}"


def test_each_model_gets_its_backend(models: dict[str, Path]) -> None:
    results = resolve([arguments(models[model], flags) for flags, model, _ in ACCEPTED])
    assert results == [("ok", backend) for _, _, backend in ACCEPTED]


def test_a_kimi_model_without_the_plugin_is_refused(models: dict[str, Path]) -> None:
    [(outcome, message)] = resolve([arguments(models["k3"], ())], {"SGLANG_PLUGINS": "k3cpu"})
    assert outcome == "refused"
    assert "SGLANG_PLUGINS" in message
