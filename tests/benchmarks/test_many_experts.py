"""A mixture of 128 large experts that writes what the trained one of 16 writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.many_experts import EXPERTS, LATENT, TOP_K, widen, width_beyond
from benchmarks.stages.models import TINY
from sglang_k3.models.reference import ReferenceModel, Trace

PROMPT = [2033, *range(40, 90), 17, 300, 4, 1200]


def _logits(folder: Path) -> tuple[torch.Tensor, Trace]:
    trace = Trace()
    return ReferenceModel.from_checkpoint(folder, torch.float32).forward(PROMPT, trace=trace), trace


def test_without_noise_it_is_the_same_function(tmp_path: Path) -> None:
    size = widen(TINY, tmp_path, 160, noise=0.0)
    assert size == EXPERTS * 4 * 3 * LATENT * 160 * 17 // 32
    (tiny, chosen), (large, copies) = _logits(TINY), _logits(tmp_path)
    torch.testing.assert_close(large, tiny, rtol=1e-3, atol=1e-3)
    for layer, ids in copies.experts.items():
        assert ((ids % 16).unflatten(1, (2, 4)) == chosen.experts[layer].unsqueeze(1)).all()


def test_with_noise_tokens_spread_over_the_groups_and_the_text_stays(tmp_path: Path) -> None:
    widen(TINY, tmp_path, 128)
    (tiny, _), (large, copies) = _logits(TINY), _logits(tmp_path)
    assert (tiny.argmax(-1) == large.argmax(-1)).float().mean() > 0.9
    for ids in copies.experts.values():
        groups = ids // (EXPERTS // 4)
        assert ids.shape == (len(PROMPT), TOP_K) and (groups == groups[:, :1]).all()
        assert (torch.bincount(groups[:, 0], minlength=4) > 0).all()


def test_a_width_beyond_a_cache_is_beyond_it(tmp_path: Path) -> None:
    assert width_beyond(None) == 128
    assert EXPERTS * 4 * 3 * LATENT * width_beyond(300 << 20) * 17 // 32 >= 1.25 * (300 << 20)


@pytest.mark.parametrize("width", [64, 200])
def test_a_width_that_does_not_fit_is_refused(tmp_path: Path, width: int) -> None:
    with pytest.raises(ValueError, match=f"width {width}: pass a multiple of 32 and at least 128"):
        widen(TINY, tmp_path, width)
