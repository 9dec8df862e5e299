"""What a run writes: figures that follow from one another, keys that are explained, files that read back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from benchmarks import counts, kernels, schema
from benchmarks.cases import Sizes, all_cases
from benchmarks.headline import kda_decode, kda_prefill, mxfp4
from benchmarks.machine import ROOT
from benchmarks.report import figures, markdown
from benchmarks.schema import Entry, Reading, Report
from sglang_k3.kernels import registry
from tests.benchmarks import planted

DOCUMENT = (ROOT / "docs" / "benchmarks.md").read_text()


def test_every_case_has_an_entry_for_each_mode_it_can_serve(report: Report):
    measured = {(entry.case, mode) for entry in report.entries for mode in entry.modes}
    cases = all_cases(Sizes.quick())
    assert {case for case, _ in measured} == {case.name for case in cases}
    fast_only = {case.name for case in cases if case.modes == ("fast",)}
    exact_only = {case.name for case in cases if case.modes == ("exact",)}
    for case in cases:
        if case.name not in exact_only:
            assert (case.name, "fast") in measured
        if case.name not in fast_only and case.dtype == "fp32":
            assert (case.name, "exact") in measured


def test_every_operator_of_the_registry_is_measured_or_known_to_be_off_the_path(report: Report):
    measured = {entry.operator for entry in report.entries}
    # K3's experts are served packed; formats are converted at loading, inside the experts, or not on a CPU;
    # a CPU's draft turns its heads, and its worker counts accepted drafts, by the oracle itself. What an NPU
    # does in one pass is on a CPU two operators, each of them measured.
    off = {f"mx.{verb}_{form}" for verb in ("quantize", "dequantize") for form in ("mxfp4", "mxfp8")}
    off |= {"moe.experts", "rotary", "acceptance.chain"}
    off |= {"activation.gated_int8", "activation.gated_mxfp8"}
    off |= {"attention_residual.merge_norm", "attention_residual.mix_norm"}
    assert measured == set(registry.operators()) - off


def test_no_entry_is_the_reference(report: Report):
    assert not [entry.case for entry in report.entries if "reference" in entry.implementation]


def test_rates_and_ratios_follow_from_the_samples(report: Report):
    # On the ticking clock everything takes a second.
    for entry in report.entries:
        assert (entry.seconds, entry.spread, entry.calls_per_sample) == (1.0, 0.0, 1)
        assert entry.samples == [1.0] * 3
        assert entry.gbytes_per_second == pytest.approx(entry.bytes_moved / 1e9)
        assert entry.gflops_per_second == pytest.approx(entry.flops / 1e9)
        assert (entry.attempts, entry.valid) == (1, True)
        assert entry.cold_bytes >= kernels.QUICK.cold_bytes
        memory = [name for name in entry.readings if not name.startswith("matmul")]
        assert entry.memory_ratio == pytest.approx(entry.gbytes_per_second / entry.readings[memory[0]].during)
        assert entry.ratio == max(entry.memory_ratio, entry.compute_ratio or 0)
        assert (entry.compute_ratio is None) == (entry.flops < entry.bytes_moved)
    assert report.valid


def test_a_bf16_operator_is_held_against_the_faster_product(report: Report):
    (entry,) = (entry for entry in report.entries if entry.case == "mla_extend_bf16")
    rates = [entry.readings[name].during for name in ("matmul_fp32", "matmul_bf16")]
    assert entry.compute_ratio == pytest.approx(entry.gflops_per_second / max(rates))


def test_named_figures_are_there(report: Report):
    keys = {key for key, _ in figures(report)}
    assert {
        "kda_decode.stream_ratio",
        "kda_prefill.matmul_ratio",
        "kda_prefill.speedup_vs_transformers",
        "mxfp4.batch1_vs_bf16",
    } <= keys
    decoded = json.loads(msgspec.json.encode(report))
    assert decoded["kda_prefill"]["speedup_vs_transformers"] == 1.0
    assert decoded["kda_prefill"]["transformers_tokens"] == 64
    assert decoded["kda_prefill"]["linearity"] == 0.5
    assert decoded["mxfp4"]["batch1_vs_bf16"] == 1.0


def entry_of(case: str, seconds: float, **changes) -> Entry:
    reading = Reading("stream", 20.0, 20.0, 20.0, 0.0, 21.0, 0.0)
    entry = Entry(
        case=case,
        operator="kda.decode",
        modes=["fast"],
        implementation="ours",
        dtype="fp32",
        shape={"requests": 4, "heads": 96, "K": 128, "V": 128},
        seconds=seconds,
        spread=0.0,
        samples=[seconds],
        calls_per_sample=1,
        bytes_moved=1,
        flops=1,
        gbytes_per_second=1.0,
        gflops_per_second=1.0,
        memory_ratio=0.5,
        compute_ratio=0.25,
        limit="memory",
        ratio=0.5,
        readings={"stream": reading},
        cold_bytes=1,
        attempts=1,
        valid=True,
        note="",
    )
    return msgspec.structs.replace(entry, **changes)


def peer_of(case: str, name: str, seconds: float) -> schema.Peer:
    return schema.Peer(case, name, "bf16", seconds, 0.0, [seconds], 1, True)


def test_stream_ratio_is_the_time_of_streaming_the_states_alone():
    # 50,331,648 bytes at 20 GB/s are 2.5166 ms; a step of 5 ms is half as fast.
    figure = kda_decode([entry_of("kda_decode", 5.0332e-3)])
    assert figure is not None and figure.stream_ratio == pytest.approx(0.5, rel=1e-4)
    assert counts.kda_state_traffic(4, 96, 128, 128) / 20e9 == pytest.approx(2.5166e-3, rel=1e-4)
    assert kda_decode([]) is None


def test_prefill_figures_take_the_longest_its_half_and_the_peers_length():
    entries = [
        entry_of(f"kda_prefill_{tokens}", seconds, operator="kda.extend", shape={"tokens": tokens})
        for tokens, seconds in ((4096, 0.9), (2048, 0.4), (1024, 0.2))
    ]
    peer = peer_of("kda_prefill_1024", "transformers", 4.0)
    figure = kda_prefill(entries, [peer])
    assert figure is not None
    assert (figure.matmul_ratio, figure.transformers_tokens) == (0.25, 1024)
    assert figure.linearity == pytest.approx(0.9 / 2 / 0.4)
    assert figure.speedup_vs_transformers == pytest.approx(20.0)
    assert figure.speedup_vs_transformers_full is None
    both = kda_prefill(entries, [peer, peer_of("kda_prefill_4096", "transformers", 18.0)])
    assert both is not None
    assert both.speedup_vs_transformers_full == pytest.approx(20.0)
    assert (both.transformers_tokens, both.transformers_full_tokens) == (1024, 4096)


def test_packed_figures_say_how_many_times_faster_than_torch():
    entries = [entry_of(f"mxfp4_expert_{rows}", 2.0) for rows in (1, 16)]
    peers = [
        peer_of("mxfp4_expert_1", "torch linear bf16", 3.0),
        peer_of("mxfp4_expert_1", "torch linear fp32", 1.0),
        peer_of("mxfp4_expert_16", "torch linear bf16", 4.0),
    ]
    figure = mxfp4(entries, peers)
    assert figure == schema.Mxfp4(
        batch1_vs_bf16=1.5, rows16_vs_bf16=2.0, rows64_vs_bf16=None, batch1_vs_fp32=0.5
    )


def test_every_key_is_explained():
    structs = (schema.Report, schema.Machine, schema.Settings, schema.Reading, schema.Entry, schema.Peer)
    keys = {name for struct in structs for name in struct.__struct_fields__}
    for group, struct in (
        ("kda_decode", schema.KdaDecode),
        ("kda_prefill", schema.KdaPrefill),
        ("mxfp4", schema.Mxfp4),
    ):
        keys |= {f"{group}.{name}" for name in struct.__struct_fields__}
    assert len(keys) > 50
    explained = set(re.findall(r"`([\w.]+)`", DOCUMENT))
    assert not keys - explained


def test_files_read_back_and_hold_the_table(report: Report, tmp_path: Path):
    kernels.write(report, tmp_path)
    assert schema.load(tmp_path / "kernels-quick.json") == report
    text = (tmp_path / "kernels-quick.md").read_text()
    assert "Quick run" in text and "kernels-quick.png" in text
    for entry in report.entries:
        assert f"| {entry.case} | {', '.join(entry.modes)} | {entry.implementation} |" in text
    picture = (tmp_path / "kernels-quick.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_part_of_a_run_does_not_overwrite_a_whole_one(report: Report, tmp_path: Path):
    settings = msgspec.structs.replace(report.settings, regime="full", only=["kda.decode"])
    kernels.write(msgspec.structs.replace(report, settings=settings), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        f"kernels-kda.decode.{ending}" for ending in ("json", "md", "png")
    }


def test_an_invalid_line_shows(report: Report):
    entries = [msgspec.structs.replace(report.entries[0], valid=False), *report.entries[1:]]
    text = markdown(msgspec.structs.replace(report, entries=entries, valid=False), "x.png")
    assert "**Not valid" in text
    assert len(re.findall(r"\| NO \|", text)) == 1
    assert "**Not valid" not in markdown(report, "x.png")


def test_operators_are_selected_by_registry_key_or_case():
    cases = all_cases(Sizes.full())
    assert [case.name for case in kernels.select(cases, ["kda.decode"])] == ["kda_decode", "kda_decode_bf16"]
    assert [case.name for case in kernels.select(cases, ["route_decode"])] == ["route_decode"]
    assert kernels.select(cases, []) == cases
    with pytest.raises(ValueError, match=r"unknown operator kda\.decod; known: activation"):
        kernels.select(cases, ["kda.decod"])


def test_the_command_runs_on_the_real_clock(tmp_path: Path, capsys: pytest.CaptureFixture):
    code = kernels.main(["--quick", "--only", "output_gate", "--out", str(tmp_path)])
    written = schema.load(tmp_path / "kernels-quick-output_gate.json")
    assert code == (0 if written.valid else 1)
    assert [entry.operator for entry in written.entries] == ["output_gate"] * 4
    assert all(0 < entry.seconds < 10 for entry in written.entries)
    assert written.kda_decode is None and written.mxfp4 is None
    assert "output_gate_decode_fp32" in capsys.readouterr().out


def test_a_planted_run_measures_the_same_lines(tmp_path: Path):
    planted.main(["output_gate", "0.5", "--quick", "--only", "output_gate", "--out", str(tmp_path)])
    written = schema.load(tmp_path / "kernels-quick-output_gate.json")
    assert [(entry.operator, entry.implementation) for entry in written.entries] == [
        ("output_gate", "numba")
    ] * 4


def test_an_unknown_operator_ends_the_command_with_the_known_ones(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as stopped:
        kernels.main(["--quick", "--only", "nonsense"])
    assert stopped.value.code == 2
    assert "unknown operator nonsense; known: " in capsys.readouterr().err
