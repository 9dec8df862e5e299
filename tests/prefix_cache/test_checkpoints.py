"""Where a prefill chunk keeps its state: at a whole page, under the key of that depth."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import _MambaRadixCacheV2TrackEntry as Entry

from sglang_k3.prefix_cache.checkpoints import prefill_checkpoint

KIMI = "KimiK3ForConditionalGeneration"


def choose(
    *, architecture: str = KIMI, start: int = 0, end: int = 0, prompt: int = 0, page: int = 16,
    fork: int | None = None, stock: int | None = None, lazy: bool = False,
):  # fmt: skip
    """stock: the depth that SGLang keeps a state at, if it keeps one."""
    kv = SimpleNamespace(mamba_last_track_seqlen=None, mamba_next_track_idx=0, mamba_last_track_idx=1)
    request = SimpleNamespace(
        kv=kv,
        prefix_len=start,
        extend_end=end,
        full_untruncated_fill_ids=range(prompt or end),
        mamba_branching_seqlen=fork,
    )
    pool = SimpleNamespace(
        enable_mamba_extra_buffer_lazy=lazy, get_mamba_ping_pong_other_idx=lambda index: 1 - index
    )
    batch = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture])),
        tree_cache=SimpleNamespace(page_size=page),
        req_to_token_pool=pool,
    )

    def original(batch, req):
        position = kv.mamba_next_track_idx
        if stock is not None:
            kv.mamba_last_track_seqlen = stock
            kv.mamba_last_track_idx, kv.mamba_next_track_idx = position, position if lazy else 1 - position
        return Entry(track_mask=stock is not None, track_position=position, track_seqlen=(stock or -2) + 1)

    return prefill_checkpoint(original, batch, request), kv


@pytest.mark.parametrize(
    ("start", "end", "prompt", "page", "kept"),
    [
        (0, 100, 100, 16, 64),  # in front of an answer's opening
        (64, 100, 100, 16, 96),  # in front of the last token, where that is kept already
        (0, 97, 97, 16, 64),
        (80, 96, 96, 16, 96),  # the end, which an extension can use and a repetition can't
        (0, 17, 17, 16, 16),
        (0, 16, 16, 16, 16),
        (0, 96, 300, 16, 96),  # the end of a chunk in the middle
        (0, 96, 100, 16, 64),  # a chunk in the middle that ends within the opening
        (30, 286, 600, 16, 272),  # a chunk that starts off a page
        (0, 286, 286, 1, 253),
        (222, 331, 400, 128, 256),
    ],
)
@pytest.mark.parametrize("stock", [None, 64])
@pytest.mark.parametrize("lazy", [False, True])
def test_the_state_is_kept_at_the_deepest_whole_page(start, end, prompt, page, kept, stock, lazy) -> None:
    entry, kv = choose(start=start, end=end, prompt=prompt, page=page, stock=stock, lazy=lazy)
    assert entry == Entry(track_mask=True, track_position=0, track_seqlen=kept)
    assert kv.mamba_last_track_seqlen == kept
    assert (kv.mamba_last_track_idx, kv.mamba_next_track_idx) == (0, 0 if lazy else 1)


@pytest.mark.parametrize(
    ("fork", "kept"), [(64, 64), (80, 80), (48, 144), (144, 144), (160, 144), (16, 144), (None, 144)]
)
def test_a_fork_inside_the_chunk_goes_first(fork, kept) -> None:
    entry, kv = choose(start=16, end=180, fork=fork)
    assert entry.track_seqlen == kv.mamba_last_track_seqlen == kept


@pytest.mark.parametrize(("start", "end", "prompt"), [(0, 9, 9), (0, 15, 400), (96, 100, 100)])
def test_less_than_a_page_keeps_nothing(start, end, prompt) -> None:
    entry, kv = choose(start=start, end=end, prompt=prompt)
    assert not entry.track_mask
    assert kv.mamba_last_track_seqlen is None and kv.mamba_next_track_idx == 0


def test_other_models_keep_sglangs_choice() -> None:
    entry, kv = choose(architecture="Qwen3NextForCausalLM", end=100, stock=64)
    assert (entry.track_seqlen, kv.mamba_last_track_seqlen) == (65, 64)
