"""The prefix cache of a real server: what answers, metrics and `sglang-k3 cache` say agree to the token."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_k3.prefix_cache import view
from tests.server.conftest import TINY
from tests.server.harness import Server, play_sessions, told

FLAGS = ("--dtype", "float32", "--enable-deterministic-inference", "--page-size", "16")
FLAGS += ("--max-running-requests", "2", "--max-mamba-cache-size", "12", "--max-total-tokens", "4096")
FLAGS += ("--mamba-track-interval", "64", "--enable-metrics", "--enable-cache-report")
LOST = ("lost_evicted", "lost_none_stored", "lost_off_grid", "lost_no_slot")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(TINY, tmp_path_factory.mktemp("cache") / "log", *FLAGS) as running:
        yield running


def details(answer: dict[str, Any]) -> dict[str, int]:
    return answer["meta_info"]["cached_tokens_details"]


def test_figures_agree_to_the_token(server: Server, prompts: list[list[int]]) -> None:
    """Prompts, their forks and repetitions, more of them than there are states: each answer's own count,
    added up, is what the counters gained."""
    server.flush()
    base = [ids for ids in prompts if len(ids) > 100][:4]
    asked = [*base, *(ids[:70] + ids[-30:] for ids in base), *base, *(ids[:-20] for ids in base), *base]
    server.answer([1, 2, 3], 1)
    before = view.read(view.fetch(server.url))
    answers = [server.answer(ids, 4) for ids in asked]
    after = view.read(view.fetch(server.url))
    hit = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
    lost = {name: sum(details(answer)[name] for answer in answers) for name in LOST}
    assert after.hit_tokens - before.hit_tokens == hit > 0
    for name, tokens in lost.items():
        reason = name.removeprefix("lost_")
        assert after.lost_tokens[reason] - before.lost_tokens[reason] == tokens
    assert lost["lost_none_stored"] > 0
    assert after.prompt_tokens - before.prompt_tokens == sum(map(len, asked))
    assert sum(after.slots.values()) == 12 and min(after.slots.values()) >= 0
    assert after.slots["running"] == after.slots["held"] == 0, "no request is running"
    # Three KDA layers of four heads: a state of 64 x 64 and a window of three rows, in float32.
    assert after.slot_bytes == 3 * 4 * (4 * 64 * 64 + 3 * 3 * 4 * 64)


def test_the_command_shows_the_same(server: Server) -> None:
    server.answer([5, 6, 7] * 20, 2)
    done = subprocess.run(
        [sys.executable, "-m", "sglang_k3.cli", "cache", "--url", server.url, "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shown, want = json.loads(done.stdout), view.read(view.fetch(server.url))
    assert shown["hit_tokens"] == want.hit_tokens
    assert shown["lost_tokens"] == want.lost_tokens
    assert sum(shown["slots"].values()) == 12


def test_eight_sessions_of_six_turns_are_a_cold_servers(server: Server, prompts: list[list[int]]) -> None:
    """Turn by turn, edits in the middle, a pool for half of the sessions' states."""
    fresh = [token for ids in prompts for token in ids]

    def play(cold: bool) -> tuple[list[tuple], int]:
        server.flush()
        texts, hits = [], []

        def answer(ids: list[int]) -> list[int]:
            reply = server.answer(ids, 10)
            texts.append(told(reply))
            hits.append(reply["meta_info"]["cached_tokens"])
            if cold:
                server.flush()
            return reply["output_ids"]

        play_sessions(fresh, answer)
        return texts, sum(hits)

    cold, nothing = play(cold=True)
    warm, hits = play(cold=False)
    assert nothing == 0
    assert warm == cold
    assert hits > 300


def test_sglangs_sessions_go_on_where_they_were(server: Server, prompts: list[list[int]]) -> None:
    """Two branches off the first turn of one session; texts are those of the whole prompt at once."""
    server.flush()
    first, left, right = [ids[:60] for ids in prompts if len(ids) >= 60][:3]
    session = server.post("/open_session", {"capacity_of_str_len": 4096}).json()

    def turn(ids: list[int], parent: str | None) -> dict[str, Any]:
        body = {
            "input_ids": ids,
            "session_params": {"id": session, "rid": parent},
            "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        }
        return server.post("/generate", body).json()

    root = turn(first, None)
    branches = [turn(ids, root["meta_info"]["id"]) for ids in (left, right)]
    server.post("/close_session", {"session_id": session})
    server.flush()
    for ids, branch in zip((left, right), branches, strict=True):
        whole = server.answer([*first, *root["output_ids"], *ids], 8)
        assert branch["output_ids"] == whole["output_ids"]


def test_without_metrics_the_command_names_the_flag() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglang_k3.cli", "cache", "--url", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "--url" in done.stderr


@pytest.mark.verify
def test_sglangs_own_cache_stays_selectable(
    tmp_path_factory, prompts: list[list[int]], server: Server
) -> None:
    ids = next(ids for ids in prompts if len(ids) > 200)
    server.flush()
    want = told(server.answer(ids, 6))
    log = tmp_path_factory.mktemp("stock") / "log"
    with Server(TINY, log, *FLAGS, "--radix-cache-backend", "sglang") as stock:
        assert told(stock.answer(ids, 6)) == want
        again = stock.answer(ids, 6)
        assert told(again) == want and again["meta_info"]["cached_tokens"] > 0
        assert "RustUnifiedTreeCore" in log.read_text()
        with pytest.raises(view.NoFigures, match="--radix-cache-backend"):
            view.read(view.fetch(stock.url))
    assert "UnifiedTreeCore" in server.log.read_text()
