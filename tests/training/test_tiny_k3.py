"""The checkpoint in examples/: complete, small, and good enough to be recognised."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_k3.models.config import K3Config
from sglang_k3.models.names import expected_names
from sglang_k3.models.reference import ReferenceModel
from sglang_k3.training import tokenizer as bpe
from sglang_k3.training.chat import CHAT_TEMPLATE
from sglang_k3.training.checkpoint import load_checkpoint, save_checkpoint
from sglang_k3.training.completions import NEW_TOKENS, complete, function_heads, share_parsed
from sglang_k3.training.data import Corpus, read_corpus
from sglang_k3.training.evaluate import evaluate, held_out_windows
from sglang_k3.training.generate import sampled_text
from sglang_k3.training.model import TrainingModel
from sglang_k3.training.tiny import tiny_config

TINY = Path(__file__).parents[2] / "examples" / "tiny-k3"
FILES = 8
"""Held-out files that the bits are measured on here; the model card has them all."""


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read_corpus()


def test_folder_is_small_and_complete() -> None:
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 12e6
    assert json.loads((TINY / "config.json").read_text()) == tiny_config()
    config = K3Config.from_hf(tiny_config())
    wanted = {spec.name: (spec.shape, spec.dtype) for spec in expected_names(config)}
    stored = load_file(TINY / "model.safetensors")
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == wanted
    assert (TINY / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert bpe.load(TINY).get_vocab_size() == config.vocab_size


def test_every_expert_is_used() -> None:
    tokens = bpe.load(TINY).encode(Path(__file__).read_text()).ids
    model = load_checkpoint(TINY)
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for router in model.routers:
        shares = router.load / router.load.sum()
        assert shares.min() > 0.005 and shares.max() < 0.4


def test_held_out_text_takes_few_bits(corpus: Corpus) -> None:
    held_out = held_out_windows(corpus.held_out, bpe.load(TINY), FILES)
    bits = evaluate(load_checkpoint(TINY), held_out).bits_per_byte
    print(f"{bits:.3f} bits per byte on {FILES} held-out files")
    assert 0.5 < bits <= 2.2


def test_model_card_states_a_rounding_loss_of_at_most_2_percent() -> None:
    row = re.search(r"bits per byte \| ([\d.]+) \| ([\d.]+) ", (TINY / "README.md").read_text())
    assert row is not None
    before, after = map(float, row.groups())
    assert after <= 2.2 and after / before <= 1.02


def test_completions_of_held_out_heads_are_python(corpus: Corpus, tmp_path: Path) -> None:
    save_checkpoint(TrainingModel(K3Config.from_hf(tiny_config())), tiny_config(), tmp_path)
    tokenizer = bpe.load(TINY)
    shares = []
    for folder in (TINY, tmp_path):
        model = ReferenceModel.from_checkpoint(folder, torch.float32)
        generator = torch.Generator().manual_seed(1)
        completions = complete(
            function_heads(corpus.held_out),
            lambda head, model=model, generator=generator: sampled_text(
                model, tokenizer, head, NEW_TOKENS, generator
            ),
        )
        shares.append(share_parsed(completions))
    print(f"{shares[0]:.0%} of the completions parse; {shares[1]:.0%} of the untrained model's")
    assert shares[0] >= 0.4 and shares[0] >= 3 * shares[1]
