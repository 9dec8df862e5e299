"""The ablation's gate: a stage that lost its gain is named, a slower machine and a wide spread are not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks import compare_ablation
from benchmarks.ablation import Report, Run
from benchmarks.compare import INCOMPARABLE, SLOWER
from benchmarks.machine import ROOT, describe
from benchmarks.schema import save
from sglang_k3.testing.bench_serving import Figures

STAGES = ["plain", "+ a", "+ b"]


def report(*seconds: tuple[float, ...], **changes) -> Report:
    """seconds: of each stage, by repeat."""
    runs = [
        Run(stage, repeat, 2**20, [Figures("w", 8, 4, 100, 10, 0, each, 1.0, 1.0, 5.0, 9.0, 2.0, 3.0)])
        for stage, times in zip(STAGES, seconds, strict=True)
        for repeat, each in enumerate(times)
    ]
    made = Report(describe(), "tiny-k3", "regime", [], len(seconds[0]), STAGES, [], runs)
    return msgspec.structs.replace(made, **changes)


OLD = report((10.0, 10.2, 9.8), (5.0, 5.1, 4.9), (2.0, 2.1, 1.9))


@pytest.fixture
def gate(tmp_path: Path, capsys: pytest.CaptureFixture):
    """gate(new, *options) -> (exit code, what was printed)."""

    def run(new: Report, *options: str) -> tuple[int, str]:
        save(OLD, tmp_path / "old.json")
        save(new, tmp_path / "new.json")
        code = compare_ablation.main([str(tmp_path / "old.json"), str(tmp_path / "new.json"), *options])
        return code, capsys.readouterr().out

    return run


def test_the_same_figures_and_a_machine_half_as_fast_pass(gate) -> None:
    assert gate(OLD)[0] == 0
    assert gate(report((20.0, 20.4, 19.6), (10.0, 10.2, 9.8), (4.0, 4.2, 3.8)))[0] == 0


def test_a_stage_that_lost_its_gain_is_named(gate) -> None:
    code, printed = gate(report((10.0, 10.2, 9.8), (5.0, 5.1, 4.9), (3.0, 3.1, 2.9)))
    assert code == SLOWER
    named = [line for line in printed.splitlines() if line.startswith("slower")]
    assert named == ["slower by 50.0%: + b (w, 8 at once)"]
    assert gate(report((10.0, 10.2, 9.8), (5.0, 5.1, 4.9), (3.0, 3.1, 2.9)), "--tolerance", "0.6")[0] == 0


def test_one_slow_repeat_among_others_is_no_regression(gate) -> None:
    assert gate(report((10.0, 10.2, 9.8), (5.0, 5.1, 4.9), (2.0, 3.2, 3.0)))[0] == 0


def test_what_cannot_be_compared_is_said(gate, tmp_path: Path) -> None:
    code, printed = gate(msgspec.structs.replace(OLD, model="300M", stages=["plain", "+ a"]))
    assert code == INCOMPARABLE
    assert "another model: tiny-k3, then 300M" in printed and "lacks '+ b'" in printed
    other = msgspec.structs.replace(OLD.machine, cores=64)
    assert gate(msgspec.structs.replace(OLD, machine=other))[0] == INCOMPARABLE
    missing = str(tmp_path / "nowhere.json")
    assert compare_ablation.main([missing, missing]) == INCOMPARABLE


def test_the_figures_in_docs_are_of_this_schema(capsys: pytest.CaptureFixture) -> None:
    kept = str(ROOT / "docs" / "benchmarks" / "ablation-tiny.json")
    assert compare_ablation.main([kept, kept]) == 0
    assert "DSpark speculation" in capsys.readouterr().out
