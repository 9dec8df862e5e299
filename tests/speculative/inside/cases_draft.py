"""The served draft computes what the draft was trained as."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_k3.models.config import ConfigError
from sglang_k3.speculative.simulated_acceptance import SimulatedAcceptance
from sglang_k3.training.draft_model import TrainingDraft


@pytest.fixture(scope="module")
def trained(loop) -> TrainingDraft:
    """The training form of the checkpoint that is served."""
    target = loop.worker.model_runner.model
    served = loop.worker.draft_model
    folder = Path(loop.worker.draft_model_runner.model_config.model_path)
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    model = TrainingDraft(
        served.draft_config,
        target.get_input_embeddings().weight.detach().float(),
        target.lm_head.weight.detach().float(),
    )
    model.load_state_dict(tensors)
    return model.eval()


@pytest.mark.parametrize("context", [0, 1, 40, 130])
def test_a_block_and_its_chain_are_those_of_the_training_form(loop, trained, context):
    random = torch.Generator().manual_seed(context)
    length = context + 12
    tokens = torch.randint(0, 2000, (1, length), generator=random)
    hidden = torch.randn(1, length, 3 * 192, generator=random)
    worker, served = loop.worker, loop.worker.draft_model
    pool = worker.draft_model_runner.token_to_kv_pool
    slots = torch.randperm(1000, generator=random)[:context] + 16
    if context:
        served.write_context(hidden[0, :context], torch.arange(context), slots, pool)
    table = torch.zeros(3, length, dtype=torch.int32)
    table[2, :context] = slots.int()
    got = served.draft(
        tokens[0, context : context + 1], torch.tensor([context]), table, torch.tensor([2]), pool
    )
    with torch.no_grad():
        want = trained(hidden, tokens, torch.tensor([[context]]))[0]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    base = served.base_logits(got[0])
    previous = tokens[0, context : context + 1]
    with torch.no_grad():
        for k in range(got.shape[1]):
            logits = base[k] + served.markov_head(served.markov_head.embed(previous))[0]
            torch.testing.assert_close(logits, trained.logits(want[0, k], previous[0]), rtol=1e-3, atol=1e-3)
            likely = served.confidence_head(got[0, k : k + 1], served.markov_head.embed(previous))
            trained_likely = trained.confidence(want[0, k], previous[0]).sigmoid()
            torch.testing.assert_close(likely[0], trained_likely, rtol=1e-3, atol=1e-4)
            previous = logits.argmax(-1, keepdim=True)


def test_a_proposal_is_the_markov_chain_over_the_block(loop):
    """Likeliest tokens without temperatures, and draws with them; a request at temperature 0 is never
    drawn."""
    worker = loop.worker
    table = torch.zeros(3, 8, dtype=torch.int32)
    arguments = (torch.tensor([5, 6]), torch.tensor([0, 0]), table, torch.tensor([1, 2]))
    plain = worker._proposer.propose(*arguments, None)
    assert plain.distributions is None and plain.tokens.shape == (2, 7)
    drawn = [worker._proposer.propose(*arguments, torch.tensor([[0.0], [5.0]])) for _ in range(6)]
    assert all(torch.equal(d.tokens[0], plain.tokens[0]) for d in drawn)
    assert len({tuple(d.tokens[1].tolist()) for d in drawn}) > 3
    chances = drawn[0].distributions
    torch.testing.assert_close(chances.sum(-1), torch.ones(2, 7))
    assert (chances[0].max(-1).values == 1).all() and (chances[1].max(-1).values < 0.5).all()
    picked = chances[1].gather(1, drawn[0].tokens[1].unsqueeze(1))
    assert (picked > 0).all()


@pytest.mark.parametrize("fault", ["missing", "unknown", "misshapen", "twice"])
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_tensors_name(loop, fault):
    served = loop.worker.draft_model
    tensors = load_file(Path(loop.worker.draft_model_runner.model_config.model_path) / "model.safetensors")
    before = {name: parameter.clone() for name, parameter in served.named_parameters()}
    name = "layers.1.self_attn.k_proj.weight"
    given = list(tensors.items())
    if fault == "missing":
        given = [(key, value) for key, value in given if key != name]
    elif fault == "misshapen":
        given = [(key, value[:-1] if key == name else value) for key, value in given]
    else:
        given.append((name if fault == "twice" else "layers.1.surprise.weight", tensors[name]))
    with pytest.raises(ConfigError, match="surprise" if fault == "unknown" else "k_proj"):
        served.load_weights(given)
    served.load_weights(tensors.items())
    assert all(torch.equal(parameter, before[key]) for key, parameter in served.named_parameters())


def test_a_simulated_length_is_that_of_every_step(loop, prompt, monkeypatch):
    """Whatever was drafted; a request still ends at the tokens it asked for."""
    simulated = SimulatedAcceptance(4.0, "match-expected", "real-draft-token", loop.worker._planner.agree)
    monkeypatch.setattr(loop.worker, "_simulated", simulated)
    requests = [loop.admit(f"r{tokens}", prompt(50), tokens) for tokens in (41, 44)]
    loop.finish(*requests)
    # A prefill's token, then ten steps of four; or ten and one that is cut to three.
    assert [(len(req.output_ids), req.spec_verify_ct) for req in requests] == [(41, 10), (44, 11)]
    loop.flush()
