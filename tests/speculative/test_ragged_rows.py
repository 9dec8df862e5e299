"""Packing of drafted rows, and the way back."""

from __future__ import annotations

import pytest
import torch

from sglang_k3.speculative.proposer import Proposal
from sglang_k3.speculative.ragged_rows import RaggedRows


@pytest.mark.parametrize("counts", [[1], [8], [3, 1, 8, 2], [1, 1], [4, 4, 4], [7, 8]])
def test_what_was_packed_comes_back_to_its_place(counts):
    rows = RaggedRows.of(torch.tensor(counts))
    dense = torch.arange(1, len(counts) * rows.width * 5 + 1).view(len(counts), rows.width, 5)
    packed = rows.pack(dense)
    assert rows.width == max(counts) and packed.shape == (sum(counts), 5)
    assert packed.tolist() == [row for n, count in enumerate(counts) for row in dense[n, :count].tolist()]
    back = rows.unpack(packed).view(dense.shape)
    for n, count in enumerate(counts):
        assert torch.equal(back[n, :count], dense[n, :count])
        assert not back[n, count:].any()


def test_only_rows_of_different_numbers_need_a_layout():
    assert RaggedRows.of(torch.tensor([5, 5])).layout() is None
    layout = RaggedRows.of(torch.tensor([3, 1, 8])).layout()
    assert layout is not None
    assert layout.qo_indptr_device.tolist() == [0, 3, 4, 12] and layout.graph_num_tokens == 12
    assert layout.verify_lens.tolist() == [3, 1, 8] and layout.extend_start_loc.tolist() == [0, 3, 4]


def test_requests_without_a_draft_get_rows_that_keep_the_targets_law():
    """Token 0, drawn from a distribution that is sure of it."""
    tokens, chances = torch.tensor([[5, 6], [7, 8]]), torch.tensor([[0.5, 0.4], [0.3, 0.2]])
    drawn_from = torch.rand(2, 2, 9)
    spread = Proposal(tokens, drawn_from, chances).spread(torch.tensor([True, False, True]))
    assert spread.tokens.tolist() == [[5, 6], [0, 0], [7, 8]]
    assert spread.distributions is not None and spread.confidences is not None
    assert torch.equal(spread.distributions[[0, 2]], drawn_from)
    assert spread.distributions[1].tolist() == [[1.0] + [0.0] * 8] * 2
    assert torch.equal(spread.confidences[[0, 2]], chances) and not spread.confidences[1].any()
