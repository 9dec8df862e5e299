"""Where there are packages of the NPU's compiler, a check without it fails; elsewhere it may be left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_k3.kernels.triton_targets import TARGETS
from tests.kernels.triton import compiler


@pytest.mark.parametrize(
    "host, there",
    [
        (("Linux", "x86_64", "3.11.7"), True),
        (("Linux", "aarch64", "3.11.7"), False),
        (("Linux", "x86_64", "3.12.1"), False),
        (("Linux", "x86_64", "3.1.15"), False),
        (("Darwin", "x86_64", "3.11.7"), False),
    ],
)
def test_hosts_that_have_packages_of_the_compiler(host: tuple[str, str, str], there: bool):
    assert compiler.to_be_had(*host) is there


def test_a_missing_compiler_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(compiler, "PACKAGES", tmp_path / ".npu-compiler")
    assert not compiler.available()
    with pytest.raises(RuntimeError, match="make npu-compiler"):
        compiler.lower([], tmp_path)


def test_a_compiler_that_does_not_run_is_no_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As an installation leaves it that was cut short."""
    tool = tmp_path / "ascendnpuir" / "bin" / "bishengir-compile"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\nexit 127\n")
    tool.chmod(0o755)
    monkeypatch.setattr(compiler, "PACKAGES", tmp_path)
    lowered = tmp_path / "0.ttadapter"
    lowered.write_text("")
    assert not compiler.compile_for(lowered, TARGETS[0], double_buffers=True).ok
