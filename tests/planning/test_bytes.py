"""Golden bytes of Kimi K3, from the published checkpoint and from published layouts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_k3.models.config import K3Config
from sglang_k3.models.dspark_config import DraftConfig
from sglang_k3.models.names import expected_names, is_vision
from sglang_k3.models.presets import real_draft_config, real_k3_config
from sglang_k3.planning.devices import GIB
from sglang_k3.planning.layout import sglang_layout
from sglang_k3.planning.memory import (
    CHECKPOINTS,
    DRAFT_PAGES,
    MLA_PAGES,
    RECORDS,
    STATES,
    cache_params,
    kv_bytes,
    memory,
)
from sglang_k3.planning.published import RECIPE_GIB, recipe_weights
from sglang_k3.planning.report import as_dict
from sglang_k3.planning.weights import (
    COPIES,
    KDA,
    Precision,
    draft_weights,
    expert_bytes,
    weights,
)
from tests.planning.plans import planned

CONFIG = K3Config.from_hf(real_k3_config())
DRAFT_CONFIG = DraftConfig.from_file(real_draft_config())


@pytest.mark.parametrize(
    "tp, state, size",
    [(1, "float32", 449_372_160), (1, "bfloat16", 232_316_928), (8, "float32", 56_171_520)],
)
def test_a_state_slot(tp: int, state: str, size: int) -> None:
    found = planned(tp=tp, state_dtype=state, concurrency=1)
    assert cache_params(found.deployment).mamba_cache_per_req == size
    assert as_dict(found)["units"]["slot"] == size


@pytest.mark.parametrize("kv, size", [("auto", 27_648), ("fp8", 13_824)])
def test_a_token_of_the_mla_cache_on_any_number_of_ranks(kv: str, size: int) -> None:
    for tp in (1, 16):
        assert kv_bytes(planned(tp=tp, kv_dtype=kv, concurrency=1).deployment) == size


def test_a_token_of_the_draft_cache() -> None:
    units = as_dict(planned(draft="kimi-k3", concurrency=1))["units"]
    assert units["draft_token"] == 20_480


@pytest.mark.parametrize("tp, record, conv", [(1, 122_880, 73_728), (8, 15_360, 9_216)])
def test_a_record_row_of_one_layer(tp: int, record: int, conv: int) -> None:
    """Eight rows of each, over 69 layers, in the plain form."""
    units = as_dict(planned(tp=tp, draft="kimi-k3", records="plain", concurrency=1))["units"]
    assert units["record_request"] == 69 * 8 * (record + conv)


def test_records_and_full_states_of_eight_ranks() -> None:
    """13.6 MB a request beside 8 states, windows included."""
    units = as_dict(planned(tp=8, draft="kimi-k3", records="plain", concurrency=1))["units"]
    assert units["record_request"] == 13_565_952
    assert units["states_request"] == 8 * 56_171_520


def test_the_experts_of_a_layer_take_15_72_gb() -> None:
    assert expert_bytes(CONFIG, Precision()) == 17_547_264
    assert 896 * expert_bytes(CONFIG, Precision()) == 15_722_348_544


def test_one_rank_holds_every_byte_of_the_checkpoint_apart_from_padding_and_vision() -> None:
    stored = sum(
        math.prod(tensor.shape) * tensor.dtype.itemsize
        for tensor in expected_names(CONFIG)
        if not is_vision(tensor.name)
    )
    padding = len(CONFIG.kda_layers) * (128 - 96) * 4
    found = weights(CONFIG, sglang_layout(CONFIG, None, 1, 1, 1), Precision(copies=False))
    assert sum(module.size for module in found.values()) == stored - padding == 1_559_965_598_080


def test_the_draft_has_2_249_289_601_parameters() -> None:
    assert sum(math.prod(shape) for shape in DRAFT_CONFIG.tensor_shapes().values()) == 2_249_289_601


def test_the_published_layout_of_32_cards() -> None:
    own = recipe_weights()
    assert sum(own.values()) == pytest.approx(58.51, rel=0.02)
    for name, gib in RECIPE_GIB.items():
        if name != KDA:
            assert own[name] == pytest.approx(gib, rel=0.02), name
    # The published figure leaves out everything but the five large projections of a layer.
    large = 69 * 5 * 12288 * 7168 * 2 / 32 / GIB
    assert large == pytest.approx(RECIPE_GIB[KDA], rel=0.02)
    assert own[KDA] - large == pytest.approx(0.128, abs=0.001)


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.planning.weights_probe"],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index('{"1x1"') :])


@pytest.mark.parametrize("tp, ep", [(1, 1), (8, 1), (16, 16), (16, 4)])
def test_weights_of_a_rank_are_the_served_models(built: dict[str, Any], tp: int, ep: int) -> None:
    """To the byte: parameters, what is derived from them, and the draft."""
    layout = sglang_layout(CONFIG, DRAFT_CONFIG, tp, 1, ep)
    own = weights(CONFIG, layout, Precision())
    copies = own.pop(COPIES)
    draft = draft_weights(DRAFT_CONFIG, layout, Precision().dtype)
    sums = {
        "parameters": sum(module.size for module in own.values()),
        "derived": copies.size,
        "draft": draft.size,
    }
    assert sums == built[f"{tp}x{ep}"]


def test_pools_are_counts_times_units_and_one_for_padding() -> None:
    found = planned(
        tp=16, dp=2, ep=16, draft="kimi-k3", records="ring", concurrency=8, context=4000, cached_tokens=1000,
        checkpoints=7, page_size=64,
    )  # fmt: skip
    counts, units = found.memory.counts, as_dict(found)["units"]
    tokens = 4 * 63 * 64 + 16 * 64
    assert (counts.requests, counts.slots_per_request, counts.slots) == (4, 5, 27)
    assert counts.tokens == tokens
    pools = found.memory.pools
    assert pools[STATES] == (4 * 5 + 1) * units["slot"]
    assert pools[CHECKPOINTS] == 7 * units["slot"]
    assert pools[MLA_PAGES] == (tokens + 64) * units["mla_token"]
    assert pools[DRAFT_PAGES] == (tokens + 64) * units["draft_token"]
    assert pools[RECORDS] == 5 * units["record_request"]


@pytest.mark.parametrize(
    "strategy, records, slots",
    [
        ("off", None, 1),
        ("no_buffer", None, 3),
        ("extra_buffer_lazy", None, 4),
        ("extra_buffer", None, 5),
        (None, "anchored", 2),
        ("off", "anchored", 1),
    ],
)
def test_slots_of_a_request(strategy: str | None, records: str | None, slots: int) -> None:
    draft = "none" if records is None else "kimi-k3"
    found = planned(draft=draft, records=records, cache_strategy=strategy, concurrency=1)
    assert found.memory.counts.slots_per_request == slots


def test_the_largest_concurrency_fits_and_the_next_does_not() -> None:
    found = planned("950dt", tp=16, dp=2, ep=16, draft="kimi-k3", context=32768)
    assert found.fits and found.largest == found.concurrency > 2
    assert memory(found.deployment, found.largest).total <= found.room
    assert memory(found.deployment, found.largest + 2).total > found.room


def test_what_does_not_fit_is_planned_all_the_same() -> None:
    found = planned("a3", tp=16, ep=16)
    assert (found.largest, found.fits) == (0, False)
    more = planned("950dt", tp=16, ep=16, concurrency=5000)
    assert not more.fits and 0 < more.largest < 5000
