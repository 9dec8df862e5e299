"""The command: text, JSON with the documented keys, the picture, exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.planner import PAGE, figures
from sglang_k3.cli import app

DEVICE = ["plan", "--device", "950dt", "--tp", "16", "--ep", "16", "--draft", "kimi-k3", "--concurrency", "4"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def paths(values: Any, under: str = "") -> set[str]:
    """Keys down to those whose own keys are names of parts."""
    parts = {"weights", "pools", "estimates", "seconds", "gib", "own_gib", "environment"}
    if isinstance(values, list) and values and isinstance(values[0], dict):
        return paths(values[0], under)
    if not isinstance(values, dict) or (under.rsplit(".", 1)[-1] in parts and under != "published_weights"):
        return {under}
    return set().union(*(paths(value, f"{under}.{key}".lstrip(".")) for key, value in values.items()))


def test_json_has_the_keys_that_the_documentation_has() -> None:
    result = run(*DEVICE, "--json")
    assert result.exit_code == 0
    values = json.loads(result.stdout)
    documented = re.findall(r"^\| `([a-z_.]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert paths(values) == set(documented)
    assert values["label"].startswith("Estimate")
    assert values["per_rank"]["total"] == sum(
        sum(values["per_rank"][part].values()) for part in ("weights", "pools", "estimates")
    )
    assert values["step"]["total"] == pytest.approx(sum(values["step"]["seconds"].values()))


def test_text_shows_bytes_flags_and_what_it_stands_on() -> None:
    result = run(*DEVICE)
    assert result.exit_code == 0
    for said in (
        "Estimate: bytes follow the allocator",
        "28,085,760",
        "SGLANG_K3_RECORDS=plain python -m sglang.launch_server",
        "--max-mamba-cache-size 24",
        "not attributed",
        "nothing here has run on a real NPU",
        "chooses experts uniformly",
    ):
        assert said in result.stdout


def test_the_picture_is_written_in_the_format_of_its_name(tmp_path: Path) -> None:
    for name, start in (("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml")):
        assert run(*DEVICE, "--plot", str(tmp_path / name)).exit_code == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    assert "</svg>" in (tmp_path / "plan.svg").read_text()
    refused = run(*DEVICE, "--plot", str(tmp_path / "plan.what"))
    assert refused.exit_code == 1
    assert "plan.what" in refused.stderr


def test_a_plan_that_does_not_fit_says_by_how_much_and_exits_with_1() -> None:
    result = run("plan", "--device", "a3", "--tp", "16", "--ep", "16")
    assert result.exit_code == 1
    assert "The weights alone do not fit: pass more ranks (--tp, --ep)." in result.stdout
    result = run(*DEVICE[:-1], "5000")
    assert result.exit_code == 1
    assert re.search(
        r"Does not fit: [\d,.]+ GiB too much on each rank. Pass --concurrency \d+", result.stdout
    )


def test_a_refusal_is_one_line_and_exits_with_1() -> None:
    result = run("plan", "--device", "tpu")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "unknown device 'tpu'" in result.stderr


def test_the_documented_figures_are_what_the_planner_says_now() -> None:
    assert figures() in PAGE.read_text()
