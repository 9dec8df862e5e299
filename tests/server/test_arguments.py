"""Flags that cannot work are refused when arguments are resolved, with the remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_k3.refused_flags import REFUSALS
from sglang_k3.testing.random_checkpoint import make
from sglang_k3.testing.random_draft import draft_config
from tests.compatibility.table import another_value

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
        server_args.check_server_args()
        view = resolving_view(server_args)
        results.append(["ok", view.attention_backend, view.radix_cache_backend])
    except (ValueError, AssertionError) as error:
        results.append(["refused", str(error)])
print("RESULTS" + json.dumps(results))
"""

SPECULATE = ("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path")
EXACT = ("--enable-deterministic-inference",)
# Flags, on which checkpoint, and what the refusal must contain.
REFUSED: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (("--attention-backend", "torch_native"), "k3", ("--attention-backend torch_native", "k3_cpu")),
    (("--decode-attention-backend", "torch_native"), "k3", ("--decode-attention-backend",)),
    (("--attention-backend", "k3_cpu"), "qwen3", ("--attention-backend k3_cpu", "torch_native")),
    (("--enable-hierarchical-cache",), "qwen3", ("--enable-hierarchical-cache", "are one")),
    ((*EXACT, "--dtype", "bfloat16"), "k3", ("bfloat16", "--dtype float32")),
    ((*EXACT, "--dtype", "float32", "--mamba-ssm-dtype", "bfloat16"), "k3", ("--mamba-ssm-dtype",)),
    (EXACT, "qwen3", ("deterministic inference", "torch_native")),
    (("--radix-eviction-policy", "value"), "qwen3", ("--radix-eviction-policy value", "Kimi")),
    (
        ("--radix-eviction-policy", "marconi", "--radix-cache-backend", "sglang"),
        "k3",
        ("--radix-eviction-policy marconi", "--radix-cache-backend k3"),
    ),
    (
        ("--radix-eviction-policy", "marconi", "--radix-eviction-policy-config", '{{"alpha": -1}}'),
        "k3",
        ("alpha is -1",),
    ),
    (("--kv-events-config", '{{"publisher": "states"}}'), "qwen3", ("publisher states", "zmq")),
    (
        ("--kv-events-config", '{{"publisher": "joint", "token_ids": 1}}'),
        "k3",
        ("token_ids is 1", "true or false"),
    ),
    (
        ("--kv-events-config", '{{"publisher": "states", "batches_per_second": 0}}'),
        "k3",
        ("batches_per_second is 0", "positive"),
    ),
    (("--speculative-algorithm", "NGRAM"), "k3", ("--speculative-algorithm NGRAM", "DSPARK")),
    (("--speculative-algorithm", "DSPARK"), "k3", ("--speculative-draft-model-path",)),
    (("--dtype", "float32", *SPECULATE, "{fits}", "--enable-return-hidden-states"), "k3", ("hidden-states",)),
    (
        ("--dtype", "float32", *SPECULATE, "{other_hidden}"),
        "k3",
        ("{other_hidden}", "hidden_size 64", "this one has 256"),
    ),
    (("--dtype", "float32", *SPECULATE, "{fits}", "--enable-mixed-chunk"), "k3", ("--enable-mixed-chunk",)),
    *(
        (("--dtype", "float32", *SPECULATE, "{fits}", flag, *value), "k3", (flag,))
        for flag, value in (
            ("--speculative-dspark-sps-table-path", ("x.json",)),
            ("--speculative-dspark-confidence-sts-path", ("x.json",)),
            ("--speculative-use-block-verification", ()),
        )
    ),
    (("--dtype", "float32", *SPECULATE, "{other_vocabulary}"), "k3", ("vocab_size 777", "this one has 512")),
    (("--dtype", "float32", *SPECULATE, "{other_taps}"), "k3", ("taps layers [0, 13]", "0..12")),
    (("--dtype", "float32", *SPECULATE, "{unknown_field}"), "k3", ("unknown field surprise",)),
    (("--dtype", "float32", *SPECULATE, "{qwen3}"), "k3", ("DSparkDraftModel",)),
    (
        ("--dtype", "float32", *SPECULATE, "{fits}", "--speculative-dspark-block-size", "3"),
        "k3",
        ("7 drafts", "asks for 3"),
    ),
    ((*SPECULATE, "{fits}"), "qwen3", ("DSPARK on the CPU platform", "Kimi models only")),
    (("--radix-cache-backend", "k3"), "qwen3", ("--radix-cache-backend k3", "Kimi models only")),
    ((), "vision", ("language_model_only",)),
    ((), "k3", ("float16", "--dtype float32")),
)
# Without these SGLang refuses the flag before we do.
COMPANIONS = {
    "dwdp_size": ("--tp-size", "3"),
    "enable_return_aux_hidden_states": ("--speculative-algorithm", "EAGLE3"),
}
# Flags, on which checkpoint, and the attention backend and prefix cache that it gets.
ACCEPTED: tuple[tuple[tuple[str, ...], str, tuple[str, str | None]], ...] = (
    (("--dtype", "float32"), "k3", ("k3_cpu", "k3")),
    (("--attention-backend", "k3_cpu", "--dtype", "bfloat16"), "k3", ("k3_cpu", "k3")),
    (("--dtype", "bfloat16", "--radix-cache-backend", "sglang"), "k3", ("k3_cpu", "sglang")),
    ((*EXACT, "--dtype", "float32"), "k3", ("k3_cpu", "k3")),
    ((), "qwen3", ("torch_native", None)),
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


@pytest.fixture(scope="module")
def drafts(checkpoints: Path) -> dict[str, Path]:
    """config.json of drafts for the "k3" checkpoint above; what is wrong is the name."""

    def write(name: str, **changes: Any) -> Path:
        target: dict[str, Any] = {
            "hidden_size": 256,
            "vocab_size": 512,
            "target_layers": 13,
            "taps": [0, 6, 12],
        }
        direct = {key: changes.pop(key) for key in target if key in changes}
        config = draft_config(mask_token=300, max_positions=1 << 20, **{**target, **direct}, **changes)
        folder = checkpoints / f"draft_{name}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return {
        "fits": write("fits"),
        "other_hidden": write("other_hidden", hidden_size=64),
        "other_vocabulary": write("other_vocabulary", vocab_size=777),
        "other_taps": write("other_taps", taps=[0, 13]),
        "unknown_field": write("unknown_field", surprise=1),
    }


def resolve(cases: list[list[str]], env: dict[str, str] | None = None) -> list[tuple[str, ...]]:
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


def test_each_flag_that_cannot_work_is_refused_by_name(
    models: dict[str, Path], drafts: dict[str, Path]
) -> None:
    paths = {name: str(path) for name, path in (models | drafts).items()}
    cases = [
        (tuple(flag.format(**paths) for flag in flags), model, [part.format(**paths) for part in parts])
        for flags, model, parts in REFUSED
    ]
    results = resolve([arguments(models[model], flags) for flags, model, _ in cases])
    for (flags, model, parts), (outcome, message) in zip(cases, results, strict=True):
        assert outcome == "refused", f"{flags} on {model}: {outcome} {message}"
        for part in parts:
            assert part in message, f"{flags} on {model}: {message}"


def test_each_flag_that_may_only_be_left_alone_is_refused(models: dict[str, Path]) -> None:
    rules = [(name, refusal) for refusal in REFUSALS for name in refusal.names.split()]
    cases = [
        ("--dtype", "float32", *another_value(name, refusal.allowed), *COMPANIONS.get(name, ()))
        for name, refusal in rules
    ]
    results = resolve([arguments(models["k3"], flags) for flags in cases])
    for (name, refusal), flags, (outcome, message, *_) in zip(rules, cases, results, strict=True):
        assert outcome == "refused", f"{flags}: {outcome} {message}"
        assert f"--{name.replace('_', '-')} " in message and refusal.why in message, f"{flags}: {message}"


@pytest.mark.parametrize(
    "environment, cases",
    [
        (
            {"SGLANG_RAGGED_VERIFY_MODE": "cap-accept"},
            [((), "SGLANG_RAGGED_VERIFY_MODE=cap-accept")],
        ),
        (
            {"SGLANG_K3_RECORDS": "rings"},
            [((), "SGLANG_K3_RECORDS=rings: pass one of plain, folded, ring, anchored")],
        ),
        (
            {"SGLANG_K3_KERNELS": "triton"},
            [((), "SGLANG_K3_KERNELS=triton: our Triton kernels are built for Ascend NPUs")],
        ),
        (
            {"SGLANG_K3_KERNELS": "cuda"},
            [((), "SGLANG_K3_KERNELS=cuda: pass triton, or unset it")],
        ),
        ({"SGLANG_RAGGED_VERIFY_MODE": "compact", "SGLANG_K3_RECORDS": "ring"}, [((), None)]),
        ({"SGLANG_SIMULATE_ACC_LEN": "4"}, [((), None)]),
        (
            {"SGLANG_SIMULATE_ACC_LEN": "4", "SGLANG_RAGGED_VERIFY_MODE": "compact"},
            [((), "SGLANG_SIMULATE_ACC_LEN=4.0 cannot work with SGLANG_RAGGED_VERIFY_MODE=compact")],
        ),
        (
            {"SGLANG_SIMULATE_ACC_LEN": "4", "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real"},
            [((), "SGLANG_SIMULATE_ACC_TOKEN_MODE=real: pass one of fixed, real-draft-token")],
        ),
        (
            {"SGLANG_K3_RECORDS": "anchored"},
            [
                ((), None),
                (("--mamba-radix-cache-strategy", "extra_buffer_lazy", "--page-size", "64"), None),
                (("--mamba-radix-cache-strategy", "extra_buffer"), "strategy extra_buffer cannot work"),
                (("--mamba-track-interval", "128"), "--mamba-track-interval 128 cannot work"),
                (("--page-size", "128"), "--page-size 128 cannot work"),
                (("--disable-overlap-schedule", "--page-size", "16"), "--disable-overlap-schedule does not"),
                (("--disable-radix-cache",), "--disable-radix-cache does not"),
                (("--enable-streaming-session",), "--enable-streaming-session does not"),
            ],
        ),
    ],
)
def test_ways_to_verify_are_chosen_by_name(
    models: dict[str, Path],
    drafts: dict[str, Path],
    environment: dict[str, str],
    cases: list[tuple[tuple[str, ...], str | None]],
) -> None:
    common = ("--dtype", "float32", *SPECULATE, str(drafts["fits"]))
    results = resolve([arguments(models["k3"], (*common, *flags)) for flags, _ in cases], environment)
    for (flags, refused), (outcome, message, *_) in zip(cases, results, strict=True):
        assert (outcome == "refused") == (refused is not None), (flags, message)
        assert refused is None or refused in message, flags


def test_each_model_gets_its_backend(models: dict[str, Path]) -> None:
    results = resolve([arguments(models[model], flags) for flags, model, _ in ACCEPTED])
    assert results == [("ok", *backends) for _, _, backends in ACCEPTED]


def test_a_kimi_model_without_the_plugin_is_refused(models: dict[str, Path]) -> None:
    [(outcome, message)] = resolve([arguments(models["k3"], ())], {"SGLANG_PLUGINS": "k3cpu"})
    assert outcome == "refused"
    assert "SGLANG_PLUGINS" in message
