"""The wheel, what pip makes of it beside a vendor's torch, and the list for hosts that install without it."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from sglang_k3 import __version__
from sglang_k3.upstream import VALIDATED_SGLANG
from tests.environment import ROOT, link, with_requirements

NPU_LIST = ROOT / "requirements-npu.txt"
HOST_PROVIDES = ("torch", "torchvision", "numpy")


def run(*command: str, **kwargs) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our wheel, built from a copy so that the checkout gets no build folder."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "sglang_k3", source / "sglang_k3", ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", str(target), str(source)),
    )
    (built,) = target.glob("*.whl")
    return built


def test_wheel_declares_entry_points_and_every_module(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith("dist-info/entry_points.txt"))
        parsed = configparser.ConfigParser(delimiters="=")
        parsed.read_string(archive.read(entry_points).decode())
    assert wheel.name == f"sglang_k3-{__version__}-py3-none-any.whl"
    assert dict(parsed["sglang.srt.plugins"]) == {"k3": "sglang_k3.plugin:register"}
    assert dict(parsed["sglang.srt.platforms"]) == {"k3cpu": "sglang_k3.platforms:activate"}
    assert dict(parsed["console_scripts"]) == {"sglang-k3": "sglang_k3.cli:main"}
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "sglang_k3").rglob("*.py")}
    assert modules and modules <= names


def test_installing_the_wheel_leaves_torch_and_sglang_alone(wheel: Path, tmp_path: Path):
    """On a host with torch 2.13.0 pip would install neither torch nor SGLang, nor what wants them."""
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch==2.13.0\n")
    report = tmp_path / "report.json"
    run(
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"),
        *("--constraint", str(constraints), "--report", str(report), str(wheel)),
    )
    installed = {
        canonicalize_name(entry["metadata"]["name"]): entry["metadata"].get("requires_dist", [])
        for entry in json.loads(report.read_text())["install"]
    }
    assert {"sglang-k3", "typer", "rich"} <= set(installed)
    assert not [name for name in installed if re.match(r"(torch|sglang$|triton|nvidia)", name)]


def npu_list() -> dict[str, str]:
    """The pinned packages of requirements-npu.txt by canonical name."""
    lines = [line for line in NPU_LIST.read_text().splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines)
    return {canonicalize_name(name): version for name, version in pins.items()}


def test_one_sglang_version_everywhere():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"sglang=={VALIDATED_SGLANG}" in extras["cpu"]
    assert npu_list()["sglang"] == VALIDATED_SGLANG


def test_npu_list_holds_no_torch():
    assert not [name for name in npu_list() if re.match(r"(torch|triton|nvidia|cuda|numpy$|sglang-)", name)]


def test_npu_list_suffices_to_import_a_server(tmp_path: Path):
    """With nothing else on the path than the list and what torch brings, every server process imports."""
    link(with_requirements(*HOST_PROVIDES) | set(npu_list()), tmp_path)
    assert not (tmp_path / "flashinfer").exists()
    program = (
        "import sglang.launch_server, sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler\n"
        "import sglang.srt.managers.detokenizer_manager, sglang.srt.models.kimi_k3\n"
        "import sglang_k3.cli, sglang_k3.upstream\n"
        "from sglang_k3.kernels import registry\n"
        "print(len(registry.operators()))"
    )
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    printed = run(sys.executable, "-S", "-c", program, env={**os.environ, "PYTHONPATH": path})
    assert int(printed.split()[-1]) > 10


@pytest.mark.parametrize("target", ["serve", "demo", "doctor", "test", "verify"])
def test_make_target_sets_itself_up(target: str, tmp_path: Path):
    plan = run("make", "--dry-run", f"VENV={tmp_path / 'venv'}", target, cwd=ROOT)
    assert "-m venv" in plan and "--editable '.[cpu,test]'" in plan


DOCUMENTS = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_files_that_exist(document: str):
    """Paths of this repository in the text, and links beside the page."""
    text = (ROOT / document).read_text()
    named = {ROOT / path for path in re.findall(r"(?:tests|sglang_k3|docs)/[\w/.-]*[\w/]", text)}
    linked = {(ROOT / document).parent / path for path in re.findall(r"\]\(([^)#:]+)[^):]*\)", text)}
    assert not [str(path) for path in linked | named if not path.exists()]


def test_every_document_is_reached_from_the_readme():
    waiting, seen = [ROOT / "README.md"], set()
    while waiting:
        page = waiting.pop()
        if page.suffix == ".md" and page not in seen:
            seen.add(page)
            links = re.findall(r"\]\(([^)#:]+\.md)[^):]*\)", page.read_text())
            waiting += [(page.parent / link).resolve() for link in links]
    assert {ROOT / name for name in DOCUMENTS} <= seen
