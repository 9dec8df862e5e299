"""`sglang-k3 doctor` as a user runs it, on a sound installation and on broken ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_k3 import doctor_report
from sglang_k3.upstream import VALIDATED_SGLANG
from tests.environment import ROOT, link, with_requirements

DOCTOR = ("-m", "sglang_k3.cli", "doctor")


def python(*arguments: str, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter on our package, with `path` before everything installed."""
    search = os.pathsep.join(str(p) for p in (path, ROOT) if p is not None)
    environment = {**os.environ, "PYTHONPATH": search, "COLUMNS": "200", **env}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


def findings(done: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(f["area"], f["name"]): f for f in json.loads(done.stdout)["findings"]}


def test_sound_installation_passes_and_shows_every_choice():
    done = python(*DOCTOR, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    found = findings(done)
    assert report["healthy"] and all(finding["ok"] for finding in found.values())
    assert "K3CpuPlatform (cpu): neither an NPU nor a GPU" in found["platform", "selected"]["detail"]
    assert "are in force" in found["registrations", "plugin"]["detail"]
    assert "are in force" in found["registrations", "plugin in a worker"]["detail"]
    assert {"loopback", "ipc"} == {name for area, name in found if area == "sockets"}
    assert "GiB available" in found["machine", "memory"]["detail"]
    assert found["kernels", "order"]["detail"] == "each operator's own"
    assert report["chosen_for"] == "a CPU"

    tested = {name.split(" / ")[0] for area, name in found if area == "self-test"}
    assert {"kda.decode", "kda.extend", "short_conv.decode", "mla.paged_attention", "moe.experts"} <= tested

    choices = {(choice["operator"], choice["call"]): choice for choice in report["choices"]}
    operators = {operator for operator, _ in choices}
    calls = ("fp32 exact", "fp32 fast", "bf16 fast")
    assert set(choices) == {(operator, call) for operator in operators for call in calls}
    assert choices["linear", "fp32 fast"]["implementation"] == "few_rows_or_fp32"
    assert choices["linear", "fp32 exact"]["implementation"] == "row_dots"
    assert choices["linear", "fp32 exact"]["refusals"] == [
        *(f"{name}: its rows are not batch-invariant (exact mode)" for name in ("few_rows_or_fp32", "torch")),
        "npu torch: runs on npu, not on cpu",
    ]
    assert choices["linear", "fp32 fast"]["behind"] == ["torch", "row_dots"]


def test_other_sglang_version_is_named_with_the_remedy(tmp_path: Path):
    fake = tmp_path / "sglang-0.5.99.dist-info"
    fake.mkdir()
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.99\n")
    done = python(*DOCTOR, "--json", path=tmp_path)
    assert done.returncode == 1, done.stderr
    found = findings(done)
    version, plugin = found["versions", "sglang"], found["registrations", "plugin"]
    assert "0.5.99" in found["registrations", "plugin in a worker"]["detail"]
    assert not version["ok"] and "0.5.99" in version["detail"]
    assert f"pip install sglang=={VALIDATED_SGLANG}" in version["detail"]
    assert not plugin["ok"] and "could not register" in plugin["detail"] and "0.5.99" in plugin["detail"]


@pytest.fixture(scope="module")
def left_out(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Doctor's run where SGLANG_PLUGINS keeps our plugin out, and the report that it wrote."""
    report = tmp_path_factory.mktemp("doctor") / "report.json"
    planted = {"HF_TOKEN": "hf_planted", "SGLANG_K3_RECORDS": "/home/planted-user/private/plain"}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in planted.items():
            patched.setenv(name, value)
        return python(*DOCTOR, "--report", str(report), SGLANG_PLUGINS="k3cpu"), report


def test_plugin_left_out_is_named(left_out: tuple[subprocess.CompletedProcess[str], Path]):
    done, _ = left_out
    assert done.returncode == 1, done.stderr
    assert "hook on sglang.srt.model_loader.utils.get_model_architecture was never registered" in done.stdout
    assert "change 'config classes' is not in force" in done.stdout
    assert "SGLANG_PLUGINS=k3cpu is set" in done.stdout


@pytest.mark.parametrize("value, said", [("triton", "a server on a CPU: unset it"), ("cuda", "pass triton")])
def test_an_order_of_kernels_that_cannot_be_had_is_named(value: str, said: str):
    done = python(*DOCTOR, "--json", SGLANG_K3_KERNELS=value)
    assert done.returncode == 1, done.stderr
    wrong = [finding for finding in findings(done).values() if not finding["ok"]]
    assert [finding["area"] for finding in wrong] == ["kernels"]
    assert f"SGLANG_K3_KERNELS={value}: " in wrong[0]["detail"] and said in wrong[0]["detail"]


def test_wrong_operator_is_named():
    """An implementation that is off by a hundredth, and one that raises, each found by name."""
    program = """
import sys
from sglang_k3.kernels import registry

honest = {op: registry.implementations(op)[0].function for op in ("kda.decode", "moe.experts")}

@registry.register("kda.decode", "biased", preference=99, exact=True)
def biased(*arguments):
    return honest["kda.decode"](*arguments) + 0.01

@registry.register("moe.experts", "raising", preference=99, exact=True)
def raising(*arguments):
    raise ArithmeticError("broken on purpose")

from sglang_k3.cli import main
sys.argv = ["sglang-k3", "doctor", "--json"]
main()
"""
    done = python("-c", program)
    assert done.returncode == 1, done.stderr
    wrong = {name: f["detail"] for (_, name), f in findings(done).items() if not f["ok"]}
    assert set(wrong) == {"kda.decode / biased", "moe.experts / raising"}
    assert "max error 1.0e-02 against the reference, more than 1e-04" in wrong["kda.decode / biased"]
    assert "ArithmeticError: broken on purpose" in wrong["moe.experts / raising"]


def test_without_sglang_the_report_still_comes_out(tmp_path: Path):
    link(with_requirements("torch", "numba", "typer", "rich"), tmp_path)
    done = python("-S", *DOCTOR, path=tmp_path)
    assert done.returncode == 1, done.stderr
    assert f"SGLang is not installed: pip install sglang=={VALIDATED_SGLANG}" in done.stdout
    assert "kda.decode / numba" in done.stdout
    assert "1 of" in done.stdout and "findings are wrong" in done.stdout


def test_without_torch_the_report_still_comes_out(tmp_path: Path):
    link(with_requirements("typer", "rich"), tmp_path)
    done = python("-S", *DOCTOR, path=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "torch" in done.stdout and "not installed" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_report_for_strangers_tells_no_paths_names_or_secrets(
    left_out: tuple[subprocess.CompletedProcess[str], Path],
):
    """What is wrong is still named."""
    _, path = left_out
    text = path.read_text()
    report = json.loads(text)
    assert not report["healthy"] and report["packages"]["sglang"] == VALIDATED_SGLANG
    assert report["variables"]["SGLANG_PLUGINS"] == "k3cpu"
    assert report["variables"]["SGLANG_K3_RECORDS"] == ".../plain"
    wrong = [finding["detail"] for finding in report["findings"] if not finding["ok"]]
    assert any("get_model_architecture was never registered" in detail for detail in wrong)
    for planted in ("hf_planted", "planted-user", str(ROOT), sys.prefix, str(path.parent)):
        assert planted not in text


def test_texts_of_others_are_scrubbed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor_report.socket, "gethostname", lambda: "node-17")
    monkeypatch.setattr(doctor_report.getpass, "getuser", lambda: "maria")
    told = doctor_report.scrubbed
    assert told("OSError: '/home/maria/models/k3/config.json' is gone (maria@node-17)") == (
        "OSError: '.../config.json' is gone (USER@HOST)"
    )
    assert told("maria's file, marias file; kda.decode / numba; 3/4 of it") == (
        "USER's file, marias file; kda.decode / numba; 3/4 of it"
    )
    assert told("https://docs.sglang.ai/a/b") == "https://docs.sglang.ai/a/b"


def test_a_report_that_cannot_be_written_is_said(tmp_path: Path):
    done = python(*DOCTOR, "--report", str(tmp_path / "none" / "report.json"))
    assert done.returncode == 2 and "there is no folder" in done.stderr
