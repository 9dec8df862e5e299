"""Every launch at Kimi K3's sizes compiles for both targets, with its buffers on the chip twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_k3.kernels.triton_targets import TARGETS, Target
from tests.kernels.triton import compiler

pytestmark = [
    pytest.mark.verify,
    # Where it could be and is not, the tests fail.
    pytest.mark.skipif(not (compiler.to_be_had() or compiler.available()), reason=compiler.MISSING),
]

EACH_TARGET = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], Path]]:
    """Each launch of our kernels, and its lowered form."""
    folder = tmp_path_factory.mktemp("lowered")
    command = [sys.executable, "-m", "tests.kernels.triton.launches", str(folder / "found.json")]
    subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=compiler.ROOT, check=True)
    launches = json.loads((folder / "found.json").read_text())
    return list(zip(launches, compiler.lower(launches, folder), strict=True))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The kernel that copies whole states, by rows of its tile."""
    rows = (32, 256)
    launches = [
        {
            "file": str(Path(__file__).with_name("planted.py")),
            "kernel": "whole_state",
            "types": {"x": "*fp32", "y": "*fp32", "items": "i32"},
            "constants": {"ROWS": count, "K": 128},
        }
        for count in rows
    ]
    paths = compiler.lower(launches, tmp_path_factory.mktemp("planted"))
    return dict(zip(rows, paths, strict=True))


@EACH_TARGET
def test_every_kernel_fits_with_double_buffers(lowered: list[tuple[dict[str, Any], Path]], target: Target):
    kernels = {(launch["file"], launch["kernel"]) for launch, _ in lowered}
    assert len(kernels) >= 20
    failed = []
    for launch, path in lowered:
        outcome = compiler.compile_for(path, target, double_buffers=True)
        if not outcome.ok:
            failed.append((launch["kernel"], launch["constants"], outcome.overflow, outcome.log[-300:]))
    assert not failed


@EACH_TARGET
def test_a_kernel_known_to_fit_compiles_and_one_that_does_not_is_found(
    planted: dict[int, Path], target: Target
):
    assert compiler.compile_for(planted[32], target, double_buffers=True).ok
    too_large = compiler.compile_for(planted[256], target, double_buffers=False)
    assert not too_large.ok and too_large.overflow is not None
    needed, there = too_large.overflow
    assert there == target.on_chip * 8 and needed > there


def test_a_retry_with_single_buffers_is_no_success(planted: dict[int, Path], tmp_path: Path):
    """The compiler says so in a note and ends with 0."""
    launch = {
        "file": str(Path(__file__).with_name("planted.py")),
        "kernel": "whole_state",
        "types": {"x": "*fp32", "y": "*fp32", "items": "i32"},
        "constants": {"ROWS": 128, "K": 128},
    }
    (path,) = compiler.lower([launch], tmp_path)
    outcomes = [compiler.compile_for(path, TARGETS[0], double_buffers=double) for double in (True, False)]
    assert [outcome.ok for outcome in outcomes] == [False, True]


def test_what_triton_ascend_refuses_is_an_error_with_its_words(tmp_path: Path):
    launch = {
        "file": str(Path(__file__).with_name("planted.py")),
        "kernel": "whole_state",
        "types": {"x": "*fp32", "y": "*fp32", "items": "i32"},
        "constants": {"ROWS": 32},
    }
    with pytest.raises(RuntimeError, match="refused whole_state"):
        compiler.lower([launch], tmp_path)
