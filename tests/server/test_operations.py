"""Dashboard and alerts ask for figures that a server has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import sglang
import yaml

from sglang_k3.testing import streams
from sglang_k3.testing.server_process import draft_flags
from tests.environment import ROOT
from tests.server.conftest import TINY
from tests.server.harness import Server

OPERATIONS = ROOT / "docs" / "operations"
NAME = re.compile(r"\bsglang(?:_k3)?:\w+")
# Counters come into being with their first event, and these events are rare.
RARE = {
    "sglang:num_retracted_requests_total",
    "sglang_k3:slot_waits_total",
    "sglang_k3:slot_skips_total",
    "sglang_k3:prefix_lost_tokens_total",
}


def expressions() -> dict[str, list[str]]:
    panels = json.loads((OPERATIONS / "grafana.json").read_text())["panels"]
    rules = yaml.safe_load((OPERATIONS / "alerts.yml").read_text())["groups"][0]["rules"]
    return {
        **{panel["title"]: [target["expr"] for target in panel["targets"]] for panel in panels},
        **{rule["alert"]: [rule["expr"]] for rule in rules},
    }


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """/metrics of a speculating server with a budget that has answered."""
    flags = ("--dtype", "bfloat16", "--page-size", "16", "--max-running-requests", "2")
    flags += ("--max-mamba-cache-size", "12", "--max-total-tokens", "4096", "--enable-metrics")
    draft = draft_flags(TINY.parent / "tiny-k3-dspark")
    log: Path = tmp_path_factory.mktemp("operations") / "log"
    with Server(TINY, log, *flags, *draft, env={"SGLANG_RAGGED_VERIFY_MODE": "compact"}) as server:
        for first in range(3):
            # Times between tokens are those of a stream.
            sampling = {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True}
            streams.generate_ids(server.url, [first, *range(100, 160)], sampling)
        yield requests.get(f"{server.url}/metrics", timeout=30).text


def test_every_figure_exists(figures: str) -> None:
    asked = {name for texts in expressions().values() for text in texts for name in NAME.findall(text)}
    assert len(asked) > 15
    served = set(re.findall(r"^(sglang(?:_k3)?:\w+)", figures, re.MULTILINE))
    assert asked - served <= RARE
    assert {"sglang_k3:verify_rows_total", "sglang:spec_accept_length"} <= asked & served


def test_rare_figures_are_registered_under_these_names() -> None:
    sources = [
        *(ROOT / "sglang_k3").rglob("*.py"),
        *(Path(sglang.__path__[0]) / "srt" / "observability").rglob("*.py"),
    ]
    text = "".join(path.read_text() for path in sources)
    for name in RARE:
        # The client adds _total to a counter's name.
        assert f'"{name}"' in text or f'"{name.removesuffix("_total")}"' in text, name


def test_each_panel_and_alert_asks_for_something() -> None:
    assert len(expressions()) == 18
    assert all(NAME.search(text) or "up{" in text for texts in expressions().values() for text in texts)
