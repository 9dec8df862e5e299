"""The NPU's compiler as far as it comes without CANN: triton-ascend's lowering, then ascendnpu-ir's passes.

The passes plan every buffer on the chip, so a kernel that does not fit is found. Machine code is not made:
`hivmc`, the last step, belongs to CANN, and a stand-in takes its place. ascendnpu-ir 1.2.0 is not CANN 9.2's
compiler: a real device may plan otherwise.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_k3.kernels.triton_targets import Target

ROOT = Path(__file__).parents[3]
PACKAGES = ROOT / ".npu-compiler"
MISSING = (
    f"nothing was compiled for an NPU: triton-ascend and ascendnpu-ir are not in {PACKAGES.name}/ "
    "(make npu-compiler; Linux, x86-64 and Python 3.11)"
)

# Answers the version that the passes ask for, and hands on what it is given.
_HIVMC = """#!/bin/sh
case "$*" in *--version*) echo "hivmc 1.2.0"; exit 0;; esac
while [ $# -gt 0 ]; do
  case "$1" in -o) to="$2"; shift;; -*) ;; *) from="$1";; esac
  shift
done
[ -z "$to" ] || cp "$from" "$to"
"""


def to_be_had(system: str | None = None, machine: str | None = None, python: str | None = None) -> bool:
    """Whether there are packages of it for a host, by default this one. There, one that is missing fails."""
    host = (system or platform.system(), machine or platform.machine())
    return host == ("Linux", "x86_64") and (python or platform.python_version()).startswith("3.11.")


def available() -> bool:
    return (PACKAGES / "ascendnpuir" / "bin" / "bishengir-compile").exists()


@dataclass(frozen=True)
class Outcome:
    """ok: it compiled as asked. overflow: (bits needed, bits there) where a buffer plan failed."""

    ok: bool
    overflow: tuple[int, int] | None
    log: str


def lower(launches: list[dict[str, Any]], folder: Path) -> list[Path]:
    """One .ttadapter a launch. Raises RuntimeError with what triton-ascend said of the first that fails, and
    where there is no compiler."""
    if not available():
        raise RuntimeError(MISSING)
    given = folder / "launches.json"
    given.write_text(json.dumps(launches))
    script = Path(__file__).with_name("lowering.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(PACKAGES)
    done = subprocess.run(
        [sys.executable, str(script), str(given), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"triton-ascend did not start:\n{done.stderr[-2000:]}")
    for index, launch in enumerate(launches):
        failed = folder / f"{index}.error"
        if failed.exists():
            raise RuntimeError(f"triton-ascend refused {launch['kernel']}:\n{failed.read_text()[-3000:]}")
    return [folder / f"{index}.ttadapter" for index in range(len(launches))]


def compile_for(lowered: Path, target: Target, *, double_buffers: bool) -> Outcome:
    """Plan a lowered kernel for a target, with every buffer twice or once."""
    folder = lowered.parent
    tool = "bishengir-compile" + ("-a5" if target.soc.startswith("Ascend950") else "")
    for name in ("hivmc", "hivmc-a5"):
        stand_in = folder / name
        stand_in.write_text(_HIVMC)
        stand_in.chmod(0o755)
    command = [str(PACKAGES / "ascendnpuir" / "bin" / tool), str(lowered), f"--target={target.soc}"]
    command += [
        "--enable-hfusion-compile=true",
        "--enable-hivm-compile=true",
        "--enable-triton-kernel-compile=true",
        f"--enable-auto-multi-buffer={str(double_buffers).lower()}",
        "-o",
        str(lowered.with_suffix(f".{target.name}.o")),
    ]
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    log = done.stdout + done.stderr
    found = re.search(r"ub overflow, requires (\d+) bits while (\d+) bits available", log)
    overflow = (int(found[1]), int(found[2])) if found else None
    # It tries again with single buffers by itself, and calls that a success.
    ok = done.returncode == 0 and "overflow detected" not in log and overflow is None
    return Outcome(ok, overflow, log)
