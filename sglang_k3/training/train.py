"""Trains the tiny K3 on this machine's CPU and writes its checkpoint.

    python -m sglang_k3.training.train --out examples/tiny-k3 --minutes 40

Ends after `--tokens` or after `--minutes` of wall clock, whichever comes first; the schedule
follows whichever is ahead, so that the learning rate has come down at the end either way. An
interrupted run goes on where it last saved; `--export-only` writes the checkpoint of what there is.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Threads that spin between two small operations would take the cores from each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

from sglang_k3.models.config import K3Config
from sglang_k3.training import recipe
from sglang_k3.training.data import Corpus, read_corpus
from sglang_k3.training.dataset import prepare
from sglang_k3.training.evaluate import Evaluation, evaluate, held_out_windows
from sglang_k3.training.export import export
from sglang_k3.training.model import TrainingModel
from sglang_k3.training.optimizer import Optimizer
from sglang_k3.training.plot import loss_curve
from sglang_k3.training.tiny import tiny_config

_LOSS_ROWS = 1024
"""Rows of logits that exist at a time."""

_CLIP = 1.0
_SAVE_SECONDS = 60.0
_EVALUATE_EVERY = 100
_EVALUATED_FILES = 4
_LOG_EVERY = 10


@dataclass
class History:
    """What the plot and the model card show."""

    tokens: list[int] = field(default_factory=list)
    """Tokens seen behind each step."""
    losses: list[float] = field(default_factory=list)
    """Training loss of each step, nats a token."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """(tokens seen, bits per byte) of a few held-out files."""
    seconds: float = 0.0
    """Wall clock spent in training steps, over all resumptions."""


def backward(model: TrainingModel, batch: Tensor) -> float:
    """Adds the gradients of the mean loss of batch [rows, T + 1]; returns the loss, nats a token.

    The head's part is done slice by slice on detached rows, so logits of only a slice exist at a time.
    """
    hidden = model(batch[:, :-1]).flatten(0, 1)
    rows = hidden.detach().requires_grad_()
    targets = batch[:, 1:].flatten()
    total = 0.0
    for part, wanted in zip(rows.split(_LOSS_ROWS), targets.split(_LOSS_ROWS), strict=True):
        loss = F.cross_entropy(model.lm_head(part), wanted, reduction="sum") / len(targets)
        loss.backward()
        total += loss.item()
    hidden.backward(rows.grad)
    return total


class Run:
    """A training run that lives in a folder."""

    def __init__(self, folder: Path, seed: int, console: Console, corpus: Corpus | None = None):
        self.folder, self.seed, self.console = folder, seed, console
        folder.mkdir(parents=True, exist_ok=True)
        with console.status("Reading the corpus and learning the tokenizer ..."):
            self.corpus = read_corpus() if corpus is None else corpus
            self.dataset = prepare(self.corpus, folder, seed)
        self.model = TrainingModel(K3Config.from_hf(tiny_config()), seed)
        self.optimizer = Optimizer(self.model)
        self.generator = torch.Generator().manual_seed(seed)
        self.history = History()
        self.held_out = held_out_windows(self.corpus.held_out, self.dataset.tokenizer, _EVALUATED_FILES)
        self._load()

    @property
    def step(self) -> int:
        return len(self.history.tokens)

    @property
    def tokens(self) -> int:
        """Tokens seen."""
        return self.history.tokens[-1] if self.history.tokens else 0

    def train(self, tokens: int, seconds: float) -> None:
        """Go on until `tokens` or `seconds` of training, whichever comes first."""
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        saved = time.monotonic()
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("training", total=1.0)
            while (done := max(self.tokens / tokens, self.history.seconds / seconds)) < 1:
                progress.update(task, completed=done)
                began = time.monotonic()
                text = self._step(done)
                self.history.seconds += time.monotonic() - began
                progress.update(task, description=text)
                if self.step % _LOG_EVERY == 0:
                    self.console.print(f"{self.history.seconds:6.0f} s  {text}", soft_wrap=True)
                if self.step % _EVALUATE_EVERY == 0:
                    self.report(evaluate(self.model, self.held_out))
                if time.monotonic() - saved > _SAVE_SECONDS:
                    self.save()
                    saved = time.monotonic()
        self.save()

    def _step(self, progress: float) -> str:
        plan = recipe.plan(self.step, progress, self.seed)
        batch = self.dataset.mixture.batch(plan.rows, plan.length, self.generator)
        self.model.round_experts(plan.rounded)
        loss = backward(self.model, batch)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP).item()
        self.optimizer.step(plan.rate_factor)
        heaviest = max(router.rebalance(plan.balance_rate) for router in self.model.routers)
        history = self.history
        history.losses.append(loss)
        history.tokens.append(self.tokens + plan.rows * plan.length)
        return (
            f"step {self.step}  {self.tokens / 1e6:.2f} M tokens  loss {loss:.3f}  length {plan.length}  "
            f"rate {plan.rate_factor:.2f}  gradient {norm:.2f}  heaviest expert {heaviest:.1f} x mean"
        )

    def report(self, evaluation: Evaluation) -> None:
        """Print held-out figures and keep them for the plot."""
        self.history.held_out.append((self.tokens, evaluation.bits_per_byte))
        positions = "  ".join(
            f"{low}-{high - 1}: {loss:.2f}" for (low, high), loss in evaluation.by_position.items()
        )
        self.console.print(
            f"held out: {evaluation.bits_per_byte:.3f} bits per byte; loss by position {positions}",
            soft_wrap=True,
        )

    def save(self) -> None:
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "history": vars(self.history),
        }
        partial = self.folder / "run.partial.pt"
        torch.save(state, partial)
        partial.replace(self.folder / "run.pt")

    def _load(self) -> None:
        path = self.folder / "run.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.history = History(**state["history"])
        self.console.print(f"Going on behind step {self.step} of {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=40.0, help="wall clock for the training steps")
    parser.add_argument("--tokens", type=int, default=recipe.TOKENS)
    parser.add_argument("--work", type=Path, default=Path(".cache/tiny-k3"), help="folder of the run's state")
    parser.add_argument("--plot", type=Path, default=Path("docs/tiny-k3-loss.png"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--export-only", action="store_true", help="train no further")
    arguments = parser.parse_args()
    # Products of decays get as small as 1e-35: without this their tails cost hundreds of cycles each.
    torch.set_flush_denormal(True)
    console = Console()
    run = Run(arguments.work, arguments.seed, console)
    if not arguments.export_only:
        run.train(arguments.tokens, 60.0 * arguments.minutes)
    torch.set_flush_denormal(False)
    loss_curve(arguments.plot, run.history.tokens, run.history.losses, run.history.held_out)
    export(run.model, run.corpus, arguments.work, arguments.out, vars(run.history), console)


if __name__ == "__main__":
    main()
