"""Trains the tiny K3's DSpark draft on this machine's CPU and writes its checkpoint.

    python -m sglang_k3.training.dspark --target examples/tiny-k3 --out examples/tiny-k3-dspark --minutes 18

The target, served, first writes the text to learn from (some minutes, kept in the work folder). An
interrupted run goes on where it last saved.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Threads that spin between two small operations would take the cores from each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

from sglang_k3.models.dspark_config import DraftConfig
from sglang_k3.testing.random_draft import write_draft
from sglang_k3.training import tokenizer as bpe
from sglang_k3.training.checkpoint import load_checkpoint
from sglang_k3.training.completions import function_heads
from sglang_k3.training.data import read_corpus
from sglang_k3.training.dataset import SEPARATOR
from sglang_k3.training.draft_data import Batch, Seen, batch_of, draw, look
from sglang_k3.training.draft_model import TrainingDraft
from sglang_k3.training.optimizer import Optimizer, is_muon
from sglang_k3.training.plot import loss_curve
from sglang_k3.training.regenerate import Sample, continued, prompts
from sglang_k3.training.tiny import SAMPLING
from sglang_k3.training.tiny_draft import tiny_draft_config

PROMPTS = 1600
"""Each is continued twice: greedily, and as the target is best sampled."""

_SAMPLES, _BLOCKS = 8, 48
_WARM_UP_STEPS = 20
_DECAY_FROM = 0.4
_LAST_FACTOR = 0.03
_ROW_WEIGHT = 0.85
"""A draft only counts if those before it were accepted."""

_CONFIDENCE_WEIGHT = 0.1
_CLIP = 1.0
_SAVE_SECONDS = 60.0
_LOG_EVERY = 20


@dataclass
class History:
    """What the plot and the model card show."""

    blocks: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Accuracy:
    """accept_length: tokens a verify step gains, greedily; by_row: share of drafts that are right if all
    before them in the block are."""

    accept_length: float
    by_row: list[float]


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Muon moves the maps between hidden rows; tables and single rows are Adam's."""
    return is_muon(name, parameter) and not name.startswith(("markov_head", "confidence_head"))


def loss_of(model: TrainingDraft, batch: Batch) -> Tensor:
    """Cross entropy against the target's own distributions, and the confidence head's."""
    hidden = model(batch.hidden, batch.tokens, batch.anchors)
    logits = model.logits(hidden, batch.previous)
    with torch.no_grad():
        teacher = F.linear(batch.teacher, model.head).softmax(-1)
        weights = batch.valid * _ROW_WEIGHT ** torch.arange(batch.valid.shape[2])
        weights /= weights.sum()
        kept = teacher.gather(-1, logits.argmax(-1, keepdim=True))[..., 0]
    entropy = -(teacher * logits.log_softmax(-1)).sum(-1)
    confidence = F.binary_cross_entropy_with_logits(
        model.confidence(hidden, batch.previous), kept, reduction="none"
    )
    return ((entropy + _CONFIDENCE_WEIGHT * confidence) * weights).sum()


@torch.no_grad()
def accuracy(model: TrainingDraft, seen: list[Seen]) -> Accuracy:
    """On greedy continuations, as a server would walk through them."""
    gamma = model.draft_config.gamma
    right, asked = torch.zeros(gamma), torch.zeros(gamma)
    steps = gained = 0
    for part in seen:
        start, end = part.sample.written - 1, len(part.sample.tokens) - 1
        if end <= start:
            continue
        batch = batch_of([part], [list(range(start, end))], gamma)
        base = F.linear(model(batch.hidden, batch.tokens, batch.anchors)[0], model.head)
        previous, agrees = batch.tokens[0, start:end], []
        for k in range(gamma):
            head = model.markov_head
            previous = (base[:, k] + head.markov_w2(head.markov_w1(previous))).argmax(-1)
            agrees.append((previous == batch.wanted[0, :, k]) & batch.valid[0, :, k])
        chain = torch.stack(agrees, 1).long().cumprod(1)
        before = torch.cat([torch.ones(len(chain), 1, dtype=torch.int64), chain[:, :-1]], 1)
        right += chain.sum(0)
        asked += (before * batch.valid[0]).sum(0)
        accepted = chain.sum(1).tolist()
        at = 0
        while at < len(accepted):
            steps += 1
            gained += min(accepted[at] + 1, len(accepted) - at)
            at += accepted[at] + 1
    return Accuracy(gained / max(1, steps), (right / asked.clamp(min=1)).tolist())


class Run:
    """A training run that lives in a folder."""

    def __init__(self, target: Path, folder: Path, seed: int, console: Console, count: int = PROMPTS) -> None:
        self.target, self.folder, self.seed, self.console = target, folder, seed, console
        folder.mkdir(parents=True, exist_ok=True)
        training, held_out = self._samples(count)
        self.config = DraftConfig.from_file(tiny_draft_config())
        with console.status("Reading the text with the target's eyes ..."):
            model = load_checkpoint(target)
            model.requires_grad_(False)
            layers, mixture = self.config.tapped_layers, self.config.mixture
            self.seen, self.held_out = (
                look(model, samples, layers, mixture, lambda done, total: None)
                for samples in (training, held_out)
            )
        self.model = TrainingDraft(self.config, model.model.embed_tokens.weight, model.lm_head.weight, seed)
        self.optimizer = Optimizer(self.model, is_matrix)
        self.rng = random.Random(seed)
        self.history = History()
        self._load()

    def _samples(self, count: int) -> tuple[list[Sample], list[Sample]]:
        """(to learn from, held out and greedy), written by the target once."""
        path = self.folder / "samples.json"
        if not path.exists():
            corpus, tokenizer = read_corpus(), bpe.load(self.target)
            starts = prompts(list(corpus.training.values()), tokenizer, count, self.seed)
            held_out = [[SEPARATOR, *tokenizer.encode(head).ids] for head in function_heads(corpus.held_out)]
            with Progress(console=self.console) as progress:
                task = progress.add_task("the target writes")

                def show(done: int, total: int) -> None:
                    progress.update(task, completed=done, total=total)

                greedy = continued(self.target, [*starts, *held_out], {"temperature": 0.0}, show)
                free = continued(self.target, starts, dict(SAMPLING), show)
            learnt = [asdict(sample) for sample in [*greedy[: len(starts)], *free]]
            kept = [asdict(sample) for sample in greedy[len(starts) :]]
            path.write_text(json.dumps({"training": learnt, "held_out": kept}))
        stored = json.loads(path.read_text())
        training, held_out = (
            [Sample(**sample) for sample in stored[name]] for name in ("training", "held_out")
        )
        return [sample for sample in training if len(sample.tokens) >= 4], held_out

    def train(self, seconds: float) -> None:
        """Go on until so much time was spent in training steps."""
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        saved = time.monotonic()
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("training", total=1.0)
            while (done := self.history.seconds / seconds) < 1:
                began = time.monotonic()
                text = self._step(done)
                self.history.seconds += time.monotonic() - began
                progress.update(task, completed=done, description=text)
                if len(self.history.losses) % _LOG_EVERY == 0:
                    self.console.print(f"{self.history.seconds:6.0f} s  {text}", soft_wrap=True)
                if time.monotonic() - saved > _SAVE_SECONDS:
                    self.report()
                    self.save()
                    saved = time.monotonic()
        self.save()

    def _step(self, progress: float) -> str:
        history = self.history
        factor = min(1.0, (len(history.losses) + 1) / _WARM_UP_STEPS)
        if progress > _DECAY_FROM:
            left = (1.0 - progress) / (1.0 - _DECAY_FROM)
            factor *= _LAST_FACTOR + (1.0 - _LAST_FACTOR) * left
        batch = draw(self.seen, _SAMPLES, _BLOCKS, self.config.gamma, self.rng)
        loss = loss_of(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        self.optimizer.step(factor)
        history.losses.append(loss.item())
        history.blocks.append((history.blocks[-1] if history.blocks else 0) + _SAMPLES * _BLOCKS)
        seen = f"step {len(history.losses)}  {history.blocks[-1]} blocks"
        return f"{seen}  loss {loss.item():.3f}  rate {factor:.2f}"

    def report(self) -> Accuracy:
        """Print the accept length on held-out prompts and keep it for the plot."""
        found = accuracy(self.model, self.held_out)
        self.history.held_out.append((self.history.blocks[-1], found.accept_length))
        self.console.print(f"held out: accept length {found.accept_length:.2f}", soft_wrap=True)
        return found

    def save(self) -> None:
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.rng.getstate(),
            "history": vars(self.history),
        }
        partial = self.folder / "draft.partial.pt"
        torch.save(state, partial)
        partial.replace(self.folder / "draft.pt")

    def _load(self) -> None:
        path = self.folder / "draft.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        version, internal, gauss = state["rng"]
        self.rng.setstate((version, tuple(internal), gauss))
        self.history = History(**state["history"])
        self.console.print(f"Going on behind step {len(self.history.losses)} of {path}")

    def export(self, out: Path) -> None:
        """Write the checkpoint and its model card."""
        tensors = {
            name: value.to(torch.bfloat16).contiguous()
            for name, value in self.model.state_dict().items()
            if not name.startswith("rotary")
        }
        write_draft(out, tiny_draft_config(), tensors)
        (out / "model.safetensors").chmod(0o644)
        found = self.report()
        (out / "README.md").write_text(self._card(out, found))
        self.console.print(
            f"{out}: accept length {found.accept_length:.2f} on held-out heads", soft_wrap=True
        )

    def _card(self, out: Path, found: Accuracy) -> str:
        history, config = self.history, self.config
        size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
        recent = history.losses[-50:]
        return f"""\
# tiny-k3-dspark

A DSpark draft for [tiny-k3](../tiny-k3), in the checkpoint format of RadixArk/Kimi-K3-DSpark:
{config.num_layers} layers of grouped-query attention over the target's residual stream behind layers
{list(config.taps)}, blocks of {config.gamma} drafts, a Markov head of rank {config.markov_rank} and a
confidence head. Embedding and head are the target's. {
            sum(p.numel() for p in self.model.parameters()) / 1e6:.2f} M parameters in bf16, {size:.1f} MB.

Written by `python -m sglang_k3.training.dspark`, figures included: {len(history.losses)} steps on
{history.blocks[-1]:,} blocks in {history.seconds / 60:.0f} minutes on two cores; {len(self.seen):,} texts
that the target wrote, half of them greedily, half sampled, each cut where it starts to repeat itself;
last loss {math.fsum(recent) / len(recent):.3f} nats a draft.

On {len(self.held_out)} held-out function heads, continued greedily for up to 128 tokens and cut at
repetitions:
**{found.accept_length:.2f} tokens a verify step** of {config.gamma + 1}. Share of drafts that are right when
those before them are, by place in the block: {", ".join(f"{share:.0%}" for share in found.by_row)}.

![loss](../../docs/tiny-k3-dspark-loss.png)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=Path, default=Path("examples/tiny-k3"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=18.0, help="wall clock for the training steps")
    parser.add_argument("--work", type=Path, default=Path(".cache/tiny-k3-dspark"), help="folder of the run")
    parser.add_argument("--plot", type=Path, default=Path("docs/tiny-k3-dspark-loss.png"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_flush_denormal(True)
    run = Run(arguments.target, arguments.work, arguments.seed, Console())
    run.train(60.0 * arguments.minutes)
    run.export(arguments.out)
    history = run.history
    labels = "blocks seen", "tokens a verify step"
    loss_curve(arguments.plot, history.blocks, history.losses, history.held_out, *labels)


if __name__ == "__main__":
    main()
