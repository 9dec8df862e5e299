"""Training of a draft: what a block sees, what it learns from, and how its accept length is counted."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from sglang_k3.models.config import K3Config
from sglang_k3.models.dspark_config import DraftConfig
from sglang_k3.testing.random_draft import draft_config, draft_tensors
from sglang_k3.training.draft_data import Seen, batch_of, draw, look
from sglang_k3.training.draft_model import TrainingDraft
from sglang_k3.training.dspark import accuracy, is_matrix, loss_of
from sglang_k3.training.model import TrainingModel
from sglang_k3.training.optimizer import Optimizer
from sglang_k3.training.regenerate import Sample, tapped
from sglang_k3.training.tiny import tiny_config

GAMMA, HIDDEN, VOCABULARY = 4, 32, 50


def config(**changes):
    return draft_config(
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        target_layers=3,
        taps=[0, 2],
        mask_token=49,
        max_positions=256,
        block_size=GAMMA,
        head_dim=8,
        **changes,
    )


def model(seed=0, **changes):
    r = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=r)
    head = torch.randn(VOCABULARY, HIDDEN, generator=r) * HIDDEN**-0.5
    return TrainingDraft(DraftConfig.from_file(config(**changes)), embedding, head, seed)


def texts(count=6, length=40, seed=1):
    """Samples of a text that repeats a period of five, with hidden states that name the token."""
    r = torch.Generator().manual_seed(seed)
    look_up = torch.randn(VOCABULARY, 2 * HIDDEN, generator=r)
    last = torch.randn(VOCABULARY, HIDDEN, generator=r)
    found = []
    for i in range(count):
        tokens = [(i + j) % 5 + 10 for j in range(length)]
        ids = torch.tensor(tokens)
        found.append(Seen(Sample(tokens, 8), look_up[ids].half(), last[ids].half()))
    return found


@pytest.fixture
def inputs():
    r = torch.Generator().manual_seed(3)
    return (
        torch.randn(2, 20, 2 * HIDDEN, generator=r),
        torch.randint(0, VOCABULARY, (2, 20), generator=r),
        torch.tensor([[5, 9, 0], [12, 1, 19]]),
    )


def test_a_block_sees_the_states_in_front_of_its_anchor_and_no_others(inputs):
    hidden, tokens, anchors = inputs
    draft = model()
    before = draft(hidden, tokens, anchors)
    changed = hidden.clone()
    changed[0, 7] += 1.0
    after = draft(changed, tokens, anchors)
    differs = (after - before).abs().amax((2, 3)) > 1e-4
    assert differs.tolist() == [[False, True, False], [False, False, False]]


def test_a_block_sees_its_own_anchor_token_and_no_other_blocks(inputs):
    hidden, tokens, anchors = inputs
    draft = model()
    before = draft(hidden, tokens, anchors)
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % VOCABULARY
    differs = (draft(hidden, changed, anchors) - before).abs().amax((2, 3)) > 1e-4
    assert differs.tolist() == [[False, True, False], [False, False, False]]
    alone = draft(hidden, tokens, anchors[:, 1:2])
    torch.testing.assert_close(alone, before[:, 1:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_a_block_see_each_other_unless_it_is_causal(inputs, causal):
    _, tokens, anchors = inputs
    draft = model(is_causal=causal)
    seen = draft._seen(anchors, tokens.shape[1])[:, 0]
    own = seen[0, :GAMMA, 20 : 20 + GAMMA]
    assert own.sum() == (GAMMA * (GAMMA + 1) // 2 if causal else GAMMA**2)
    assert not seen[0, :GAMMA, 20 + GAMMA :].any()
    assert seen[0, 0, :20].sum() == 5 and seen[1, -1, :20].sum() == 19


def test_a_batch_holds_the_token_in_front_of_each_row_and_the_one_it_is_about():
    parts = texts(2, 12)
    batch = batch_of(parts, [[3, 9], [0, 10]], GAMMA)
    tokens = torch.tensor(parts[0].sample.tokens)
    assert batch.previous[0, 0].tolist() == tokens[3:7].tolist()
    assert batch.wanted[0, 0].tolist() == tokens[4:8].tolist()
    torch.testing.assert_close(batch.teacher[0, 0], parts[0].last[3:7].float())
    # Of the block at 9 two rows are within the text of 12, of that at 10 one.
    assert batch.valid[0, 1].tolist() == [True, True, False, False]
    assert batch.valid[1, 1].tolist() == [True, False, False, False]


def test_drawn_anchors_lie_within_their_samples():
    short = Seen(Sample([1, 2, 3], 2), torch.zeros(3, 2 * HIDDEN).half(), torch.zeros(3, HIDDEN).half())
    seen, rng = [*texts(5, 20), short], random.Random(0)
    for _ in range(20):
        batch = draw(seen, 3, 6, GAMMA, rng)
        assert batch.anchors.shape[1] == 6 and batch.valid[:, :, 0].all()


def test_rows_behind_a_samples_end_do_not_change_the_loss():
    draft, parts = model(), texts(2, 12)
    batch = batch_of(parts, [[9], [10]], GAMMA)
    want = loss_of(draft, batch)
    batch.teacher[~batch.valid] += 5.0
    torch.testing.assert_close(loss_of(draft, batch), want)
    batch.teacher[batch.valid] += 5.0
    assert abs((loss_of(draft, batch) - want).item()) > 1e-3


def test_a_draft_learns_a_text_that_repeats_and_its_accept_length_says_so():
    draft, seen = model(), texts()
    before = accuracy(draft, seen)
    optimizer, rng = Optimizer(draft, is_matrix), random.Random(0)
    # The teacher's head must prefer the next token, or there is nothing to learn.
    draft.head.copy_(torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(9)))
    for part in seen:
        following = torch.tensor([*part.sample.tokens[1:], part.sample.tokens[0]])
        part.last.copy_((4 * draft.head[following] / HIDDEN**0.5).half())
    for _ in range(60):
        loss = loss_of(draft, draw(seen, 4, 8, GAMMA, rng))
        loss.backward()
        optimizer.step(1.0)
    after = accuracy(draft, seen)
    assert before.accept_length < 2 < 4 < after.accept_length <= GAMMA + 1
    assert min(after.by_row) > 0.9


def test_taps_are_what_the_next_layer_reads():
    target = TrainingModel(K3Config.from_hf(tiny_config()))
    tokens = torch.randint(0, 2000, (1, 30), generator=torch.Generator().manual_seed(0))
    read: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(target.model.layers):
        norm: Any = layer.input_layernorm

        def remember(module, arguments, index=index):
            read.setdefault(index, arguments[0])

        norm.register_forward_pre_hook(remember)
    hidden, last = tapped(target, tokens, [0, 2], mixture=True)
    torch.testing.assert_close(hidden, torch.cat([read[1], read[3]], -1))
    with torch.no_grad():
        torch.testing.assert_close(last, target(tokens))
    plain, _ = tapped(target, tokens, [0, 2], mixture=False)
    assert not torch.allclose(plain, hidden)
    behind, _ = tapped(target, tokens, [4], mixture=True)
    with torch.no_grad():
        torch.testing.assert_close(target.model.norm(behind), last)


def test_looking_at_samples_of_other_lengths_changes_nothing():
    target = TrainingModel(K3Config.from_hf(tiny_config()))
    samples = [Sample([5, 6, 7, 8], 2), Sample(list(range(20, 50)), 3)]
    together = look(target, samples, [1], True, lambda done, total: None)
    for sample, seen in zip(samples, together, strict=True):
        (alone,) = look(target, [sample], [1], True, lambda done, total: None)
        assert seen.sample is sample and seen.hidden.shape == (len(sample.tokens), 192)
        torch.testing.assert_close(seen.hidden, alone.hidden, rtol=1e-2, atol=1e-2)


def test_the_training_form_has_the_checkpoints_names_and_shapes():
    own = {name: value.shape for name, value in model().state_dict().items()}
    assert own == {name: value.shape for name, value in draft_tensors(config()).items()}


def test_muon_moves_no_table():
    moved = {name for name, parameter in model().named_parameters() if is_matrix(name, parameter)}
    assert "fc.weight" in moved and "layers.0.self_attn.q_proj.weight" in moved
    assert not [name for name in moved if "markov" in name or "confidence" in name or "norm" in name]
