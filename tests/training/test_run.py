"""The loop: schedule, resumption, evaluation."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from sglang_k3.models.config import K3Config
from sglang_k3.training import recipe
from sglang_k3.training.data import Corpus, read_corpus
from sglang_k3.training.evaluate import WINDOW, HeldOut, evaluate, held_out_windows, token_losses
from sglang_k3.training.model import TrainingModel
from sglang_k3.training.optimizer import Muon, is_muon, orthogonalised
from sglang_k3.training.plot import loss_curve
from sglang_k3.training.tiny import tiny_config
from sglang_k3.training.train import Run

STEP = 2048
"""Tokens of each of the first steps."""


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    whole = read_corpus()
    names = sorted(whole.training)[:60]
    return Corpus({name: whole.training[name] for name in names}, {"a.py": "import os\n" * 30})


def _run(folder: Path, corpus: Corpus) -> Run:
    return Run(folder, 0, Console(file=io.StringIO()), corpus)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several threads share a sum as they come, and Adam divides by a gradient's own size: last bits of a
    sum near zero would decide whole steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_interrupted_run_ends_like_an_uninterrupted_one(
    tmp_path: Path, corpus: Corpus, one_thread: None
) -> None:
    whole = _run(tmp_path / "whole", corpus)
    whole.train(3 * STEP, seconds=1e9)
    parts = _run(tmp_path / "parts", corpus)
    # A single step: `train` would follow another schedule for a shorter run.
    parts._step(0.0)
    parts.save()
    resumed = _run(tmp_path / "parts", corpus)
    assert resumed.step == 1
    resumed.train(3 * STEP, seconds=1e9)
    assert resumed.history.losses == whole.history.losses
    assert resumed.history.tokens == whole.history.tokens == [STEP, 2 * STEP, 4 * STEP]
    assert whole.history.losses[-1] < whole.history.losses[0]
    for mine, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_run_stops_at_its_time_limit(tmp_path: Path, corpus: Corpus) -> None:
    run = _run(tmp_path, corpus)
    run.train(10**9, seconds=1e-6)
    assert run.step == 1 and (tmp_path / "run.pt").exists()


def test_plan_warms_up_decays_rounds_and_reaches_2048() -> None:
    start, middle, end = (recipe.plan(*at, seed=0) for at in ((0, 0.0), (300, 0.5), (600, 0.999)))
    assert start.rate_factor < 0.1 and middle.rate_factor == 1.0 and 0 < end.rate_factor < 0.05
    assert not start.rounded and not middle.rounded and end.rounded
    late = {recipe.plan(step, 0.95, seed=0).length for step in range(40)}
    assert late == {512, 1024, 2048}
    for step in range(40):
        for progress in (0.0, 0.3, 0.6, 0.9):
            plan = recipe.plan(step, progress, seed=0)
            assert plan.rows * plan.length in (2048, 4096)


def test_every_held_out_token_is_predicted_once(tmp_path: Path, corpus: Corpus) -> None:
    run = _run(tmp_path, corpus)
    text = "def f(value):\n    return value + 1\n" * 400
    held_out = held_out_windows({"b.py": text, "c.py": "x = 1\n"}, run.dataset.tokenizer)
    tokens = run.dataset.tokenizer.encode(text).ids
    assert len(tokens) > WINDOW
    targets = torch.cat([window[1:] for window in held_out.windows])
    assert targets.tolist() == tokens + run.dataset.tokenizer.encode("x = 1\n").ids
    assert held_out.bytes == len(text) + 6


@torch.no_grad()
def test_evaluation_adds_up() -> None:
    model = TrainingModel(K3Config.from_hf(tiny_config()), seed=4)
    generator = torch.Generator().manual_seed(0)
    windows = [torch.randint(2048, (n,), generator=generator) for n in (101, 34)]
    found = evaluate(model, HeldOut(windows, bytes=500))
    assert all(not router.load.any() for router in model.routers)
    losses = [F.cross_entropy(model.logits(w[None, :-1])[0], w[1:], reduction="none") for w in windows]
    total = torch.cat(losses).sum().item()
    assert found.nats == pytest.approx(total / 133, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / 500, rel=1e-5)
    first = torch.cat([part[:32] for part in losses]).mean().item()
    assert found.by_position[0, 32] == pytest.approx(first, rel=1e-4)
    assert list(found.by_position) == [(0, 32), (32, 64), (64, 128)]
    torch.testing.assert_close(token_losses(model, windows[0]), losses[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(20, 30), (16, 40), (40, 16)])
def test_muons_direction_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    stack = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalised(stack))
    assert values.min() > 0.4 and values.max() < 1.4
    together, alone = orthogonalised(stack)[1], orthogonalised(stack[1:2])[0]
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-3)


def test_muon_lowers_a_quadratic_loss() -> None:
    target = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Parameter(torch.zeros(8, 12))
    optimizer = Muon([weight], lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        (weight - target).square().sum().backward()
        optimizer.step()
    assert (weight - target).square().sum() < 0.3 * target.square().sum()


def test_embeddings_queries_and_vectors_are_left_to_adam() -> None:
    names = {
        name
        for name, parameter in TrainingModel(K3Config.from_hf(tiny_config())).named_parameters()
        if is_muon(name, parameter)
    }
    assert "model.layers.1.mlp.experts.w1" in names and "model.layers.4.self_attn.kv_b_proj.weight" in names
    left = ("embed_tokens", "lm_head", "res_proj", "norm", "conv1d", "A_log", "dt_bias", ".gate.weight")
    assert not [name for name in names if any(part in name for part in left)]


def test_loss_curve_is_a_picture(tmp_path: Path) -> None:
    loss_curve(tmp_path / "docs" / "loss.png", [10, 20, 30], [7.0, 5.0, 4.0], [(20, 2.5)])
    assert (tmp_path / "docs" / "loss.png").read_bytes().startswith(b"\x89PNG")
