"""The depth of a kept state is the length of the key it is kept under."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import _MambaRadixCacheV2TrackEntry as Entry

from sglang_k3.prefix_cache.checkpoints import prefill_checkpoint


def choose(architecture: str, depth: int, page: int, track: bool = True):
    request = SimpleNamespace(kv=SimpleNamespace(mamba_last_track_seqlen=None))
    batch = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture])),
        tree_cache=SimpleNamespace(page_size=page),
    )

    def stock(batch, req):
        req.kv.mamba_last_track_seqlen = depth
        return Entry(track_mask=track, track_position=0, track_seqlen=depth + 1)

    return prefill_checkpoint(stock, batch, request), request


@pytest.mark.parametrize(
    ("depth", "page", "kept"), [(64, 16, 64), (286, 16, 272), (286, 1, 286), (331, 128, 256)]
)
def test_the_state_is_kept_at_a_whole_page(depth: int, page: int, kept: int) -> None:
    entry, request = choose("KimiK3ForConditionalGeneration", depth, page)
    assert entry.track_seqlen == kept
    assert request.kv.mamba_last_track_seqlen == kept


def test_other_models_keep_sglangs_choice() -> None:
    entry, request = choose("Qwen3NextForCausalLM", 286, 16)
    assert entry.track_seqlen == 287
    assert request.kv.mamba_last_track_seqlen == 286


def test_an_untracked_chunk_stays_untracked() -> None:
    entry, _ = choose("KimiLinearForCausalLM", 286, 16, track=False)
    assert not entry.track_mask
    assert entry.track_seqlen == 287
