"""The regression gate: what it lets pass, what it names, and what it refuses to compare."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks import compare, schema
from benchmarks.schema import Report
from tests.benchmarks.conftest import quick_report
from tests.benchmarks.planted import TickingClock, resolve_with, slower_by


@pytest.fixture
def gate(report: Report, tmp_path: Path, capsys: pytest.CaptureFixture):
    """gate(new, *options) -> (exit code, what was printed), the shared report being the old one."""

    def run(new: Report, *options: str) -> tuple[int, str]:
        schema.save(report, tmp_path / "old.json")
        schema.save(new, tmp_path / "new.json")
        code = compare.main([str(tmp_path / "old.json"), str(tmp_path / "new.json"), *options])
        return code, capsys.readouterr().out

    return run


def slowed(operator: str, share: float) -> Report:
    """A whole quick measurement in which every call of one operator takes `share` more time."""
    clock = TickingClock()
    return quick_report(clock, resolve_with(operator, slower_by(share, clock)))


def changed(report: Report, case: str, **changes) -> Report:
    entries = [
        msgspec.structs.replace(entry, **changes) if entry.case == case else entry for entry in report.entries
    ]
    return msgspec.structs.replace(report, entries=entries)


def named(printed: str, start: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith(start)]


def test_the_same_measurement_passes(gate, report: Report):
    code, printed = gate(report)
    assert code == 0
    assert not named(printed, "slower") and not named(printed, "can't")


def test_a_planted_slow_down_of_a_fifth_in_one_kernel_fails_and_is_named(gate):
    code, printed = gate(slowed("gated_rms_norm", 0.2))
    assert code == compare.SLOWER
    found = named(printed, "slower by 20.0%: ")
    assert len(found) == 8 and len(named(printed, "slower")) == 8
    assert all("gated_rms_norm" in line for line in found)


def test_a_machine_that_is_slower_as_a_whole_passes(gate, report: Report):
    slow = quick_report(TickingClock(step=2.0))
    assert [entry.seconds for entry in slow.entries] == [2 * entry.seconds for entry in report.entries]
    assert gate(slow)[0] == 0


@pytest.mark.parametrize(
    ("share", "options", "code"), [(0.09, (), 0), (0.11, (), 1), (0.2, ("--tolerance", "0.25"), 0)]
)
def test_tolerance_is_a_share_of_the_time(gate, report: Report, share: float, options, code: int):
    (entry,) = (entry for entry in report.entries if entry.case == "route_decode")
    assert gate(changed(report, "route_decode", ratio=entry.ratio / (1 + share)), *options)[0] == code


def test_a_faster_kernel_passes(gate, report: Report):
    (entry,) = (entry for entry in report.entries if entry.case == "route_decode")
    assert gate(changed(report, "route_decode", ratio=3 * entry.ratio))[0] == 0


def test_a_mode_that_got_an_implementation_of_its_own_is_compared_with_the_shared_one(gate, report: Report):
    (shared,) = (entry for entry in report.entries if entry.case == "kda_decode")
    assert shared.modes == ["fast", "exact"]
    others = [entry for entry in report.entries if entry.case != "kda_decode"]
    fast = msgspec.structs.replace(shared, modes=["fast"], implementation="new", ratio=2 * shared.ratio)
    exact = msgspec.structs.replace(shared, modes=["exact"], ratio=shared.ratio / 1.5)
    code, printed = gate(msgspec.structs.replace(report, entries=[*others, fast, exact]))
    assert code == compare.SLOWER
    assert named(printed, "slower") == ["slower by 50.0%: kda_decode (exact, kda.decode)"]


def test_a_missing_operator_is_named(gate, report: Report):
    kept = [entry for entry in report.entries if entry.case != "route_decode"]
    code, printed = gate(msgspec.structs.replace(report, entries=kept))
    assert code == compare.INCOMPARABLE
    assert named(printed, "can't compare") == [
        f"can't compare: the new file lacks route_decode ({mode}, moe.route)" for mode in ("fast", "exact")
    ]


def test_an_operator_that_only_the_new_file_has_is_no_obstacle(gate, report: Report):
    added = msgspec.structs.replace(report.entries[0], case="something_new")
    assert gate(msgspec.structs.replace(report, entries=[*report.entries, added]))[0] == 0


def test_an_invalid_entry_is_refused_even_if_it_looks_fast(gate, report: Report):
    code, printed = gate(changed(report, "mxfp4_expert_16", valid=False, ratio=9.0))
    assert code == compare.INCOMPARABLE
    assert named(printed, "can't") == [
        "can't compare: mxfp4_expert_16 (fast) is marked invalid in the new file: its probes disagreed"
    ]


@pytest.mark.parametrize(("what", "value"), [("cpu", "Other"), ("threads", 64), ("torch_capability", "AMX")])
def test_another_machine_is_refused(gate, report: Report, what: str, value):
    code, printed = gate(
        msgspec.structs.replace(report, machine=msgspec.structs.replace(report.machine, **{what: value}))
    )
    assert code == compare.INCOMPARABLE
    assert len(named(printed, f"can't compare: another {what}: ")) == 1


def test_a_quick_run_is_not_compared_with_a_full_one(gate, report: Report):
    settings = msgspec.structs.replace(report.settings, regime="full")
    code, printed = gate(msgspec.structs.replace(report, settings=settings))
    assert code == compare.INCOMPARABLE
    assert "another regime: 'quick', then 'full'" in printed


def test_another_shape_is_refused(gate, report: Report):
    code, printed = gate(changed(report, "route_extend", shape={"tokens": 1}))
    assert code == compare.INCOMPARABLE
    assert "route_extend (fast) was measured at another shape" in printed


def test_another_schema_is_refused(gate, report: Report, tmp_path: Path):
    code, printed = gate(msgspec.structs.replace(report, version=schema.VERSION + 1))
    assert code == compare.INCOMPARABLE
    assert f"has schema {schema.VERSION + 1}, this program reads {schema.VERSION}" in printed


@pytest.mark.parametrize("content", [None, "", "{}", '{"version": 1, "entries": []}'])
def test_a_file_that_is_no_report_is_refused(
    content: str | None, report: Report, tmp_path: Path, capsys: pytest.CaptureFixture
):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    schema.save(report, old)
    if content is not None:
        new.write_text(content)
    assert compare.main([str(old), str(new)]) == compare.INCOMPARABLE
    assert "new.json" in capsys.readouterr().out
