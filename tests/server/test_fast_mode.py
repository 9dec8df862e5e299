"""The fast mode on real servers: right up to rounding, tokens by the margin rule."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_k3.models.reference import ReferenceModel, Trace
from sglang_k3.testing.server_process import draft_flags
from tests.server.conftest import Model, must_hit
from tests.server.harness import Server, play_sessions
from tests.server.margin import Verdict, check

TINY_DRAFT = Path(__file__).parents[2] / "examples" / "tiny-k3-dspark"
NEW_TOKENS = 16
POOLS = ("--max-total-tokens", "16384", "--max-mamba-cache-size", "200", "--max-running-requests", "8")


def compare(model: Path, prompts: list[list[int]], log: Path, *flags: str) -> list[Verdict]:
    oracle = ReferenceModel.from_checkpoint(model, torch.float64)
    with Server(model, log, *POOLS, *flags) as server:
        server.flush()
        cold = server.generate_all(prompts, NEW_TOKENS, at_once=8)
        warm = server.generate_all(prompts, NEW_TOKENS, at_once=8)
    for prompt, reply in zip(prompts, warm, strict=True):
        assert reply.cached > 0 or not must_hit(len(prompt)), f"a prompt of {len(prompt)} tokens missed"
    return [
        check(oracle, prompt, reply.ids, reply.logprobs)
        for replies in (cold, warm)
        for prompt, reply in zip(prompts, replies, strict=True)
    ]


@pytest.mark.parametrize("checkpoint", ["trained", pytest.param("random", marks=pytest.mark.verify)])
def test_float32_tokens_are_the_reference_models_cold_and_from_the_cache(
    checkpoint: str, trained_k3: Model, packed_k3: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    model = trained_k3 if checkpoint == "trained" else Model(packed_k3, prompts)
    verdicts = compare(
        model.path,
        model.prompts,
        tmp_path / "log",
        "--dtype",
        "float32",
        "--page-size",
        "16",
        "--chunked-prefill-size",
        "512",
    )
    error = max(verdict.largest_logprob_error for verdict in verdicts)
    excused = sum(verdict.excused for verdict in verdicts)
    compared = sum(verdict.compared for verdict in verdicts)
    print(f"{compared} positions compared, {excused} excused, largest logprob error {error:.2e}")
    assert [verdict.wrong for verdict in verdicts] == [()] * len(verdicts)
    assert compared >= 0.9 * len(verdicts) * NEW_TOKENS
    assert error < 1e-2


@pytest.mark.verify
@pytest.mark.parametrize("draft", [(), draft_flags(TINY_DRAFT)], ids=["plain", "speculating"])
def test_sessions_with_edits_and_a_small_pool_are_the_reference_models(
    draft: tuple[str, ...], trained_k3: Model, tmp_path: Path
) -> None:
    """Eight sessions of six turns, a pool for twelve states: tokens by the margin rule, turn by turn."""
    oracle = ReferenceModel.from_checkpoint(trained_k3.path, torch.float64)
    fresh = [token for ids in trained_k3.prompts for token in ids]
    flags = ("--dtype", "float32", "--page-size", "16", "--max-running-requests", "2")
    flags += ("--max-mamba-cache-size", "12", "--max-total-tokens", "4096", *draft)
    verdicts, cached = [], []
    with Server(trained_k3.path, tmp_path / "log", *flags) as server:

        def answer(ids: list[int]) -> tuple[int, ...]:
            reply = server.generate(ids, 10)
            verdicts.append(check(oracle, ids, reply.ids, reply.logprobs))
            cached.append(reply.cached)
            return reply.ids

        play_sessions(fresh, answer)
    hits = sum(cached)
    compared, excused = sum(v.compared for v in verdicts), sum(v.excused for v in verdicts)
    print(f"{hits} tokens hit, {compared} positions compared, {excused} excused")
    assert [verdict.wrong for verdict in verdicts] == [()] * 48
    assert compared >= 0.9 * 480 and hits > 300
    assert max(verdict.largest_logprob_error for verdict in verdicts) < 1e-2


@pytest.mark.parametrize(
    "preset", [pytest.param("kimi-linear", marks=pytest.mark.verify), "kimi-linear-transformers"]
)
def test_kimi_linear_is_served_by_the_same_classes_in_both_dialects(
    preset: str, checkpoints: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    from sglang_k3.testing.random_checkpoint import make

    model = make(preset, checkpoints / preset)
    verdicts = compare(model, prompts[:16], tmp_path / "log", "--dtype", "float32", "--page-size", "16")
    assert [verdict.wrong for verdict in verdicts] == [()] * len(verdicts)
    assert max(verdict.largest_logprob_error for verdict in verdicts) < 1e-2


def test_bfloat16_layers_point_where_the_reference_points(
    bf16_k3: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Cosine of each token's hidden state in front of each layer, and how often a router chose otherwise."""
    chosen = [prompt for prompt in prompts if len(prompt) in (1, 17, 64, 200, 513)]
    (tmp_path / "prompts.json").write_text(json.dumps(chosen))
    output = tmp_path / "layers.pt"
    command = [sys.executable, "-m", "tests.server.layer_probe", str(bf16_k3)]
    command += [str(tmp_path / "prompts.json"), str(output), "--disable-radix-cache", *POOLS]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=600)
    served = torch.load(output)

    oracle = ReferenceModel.from_checkpoint(bf16_k3, torch.float32)
    cosines: list[list[torch.Tensor]] = [[] for _ in range(oracle.config.num_layers)]
    other = total = 0
    for prompt, result in zip(chosen, served, strict=True):
        trace = Trace()
        oracle.forward(prompt, trace=trace)
        for layer, expected in enumerate(trace.mixtures):
            got = result["hidden"][layer]
            cosines[layer].append(torch.cosine_similarity(got, expected, dim=-1))
        for layer, experts in trace.experts.items():
            other += int((result["experts"][layer] != experts).any(-1).sum())
            total += experts.shape[0]
    print(f"share of tokens with another expert set: {other / total:.4f} of {total}")
    for layer, parts in enumerate(cosines):
        values = torch.cat(parts)
        median, first = values.median().item(), values.quantile(0.01).item()
        print(f"layer {layer:2d}: median cosine {median:.6f}, first percentile {first:.6f}")
        assert median >= 0.999
        assert first >= 0.98
