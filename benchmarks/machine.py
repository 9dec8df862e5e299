"""The machine and the software a measurement was made with."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

import sglang_k3
from benchmarks.schema import Machine

ROOT = Path(__file__).parents[1]
_SYSFS_CPUS = Path("/sys/devices/system/cpu")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MEASURED = ("sglang_k3/kernels", "benchmarks")
"""Files whose uncommitted changes make a measurement another one than its commit says."""


def l3_bytes(cpus: Path = _SYSFS_CPUS) -> int | None:
    """All last-level (level 3) cache of the machine in bytes, each shared cache once; None if unknown."""
    return _l3_of_sysfs(cpus) or _l3_of_lscpu(_output("lscpu", "-B"))


def _l3_of_sysfs(cpus: Path) -> int:
    sizes: dict[str, int] = {}
    for cache in cpus.glob("cpu[0-9]*/cache/index*"):
        if (cache / "level").read_text().strip() != "3":
            continue
        shared_by = (cache / "shared_cpu_list").read_text().strip()
        found = re.fullmatch(r"(\d+)([KMG]?)", (cache / "size").read_text().strip())
        if found:
            sizes[shared_by] = int(found[1]) * _UNITS[found[2]]
    return sum(sizes.values())


def _l3_of_lscpu(text: str) -> int | None:
    """From `lscpu -B`: a total in bytes over all instances."""
    found = re.search(r"^L3 cache:\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None


def cold_bytes(l3: int | None) -> int:
    """Bytes to walk through before anything is used again: max(1 GiB, 2 x L3)."""
    return max(1 << 30, 2 * (l3 or 0))


def describe() -> Machine:
    """This machine now. Versions that are not installed are left out."""
    l3 = l3_bytes()
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        l3_bytes=l3,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        threads=torch.get_num_threads(),
        torch_capability=torch.backends.cpu.get_cpu_capability(),
        huge_pages=_selected(_HUGE_PAGES.read_text()) if _HUGE_PAGES.exists() else "unknown",
        load_average=os.getloadavg()[0],
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions={"python": platform.python_version(), "sglang_k3": sglang_k3.__version__} | _versions(),
        commit=_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def has_bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether products of bf16 matrices are instructions here; elsewhere torch emulates them, many times
    slower than those of fp32."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    return found is not None and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(found[1].split())


def _selected(choices: str) -> str:
    """The bracketed word of a sysfs choice such as "always [madvise] never"."""
    found = re.search(r"\[(\w+)\]", choices)
    return found[1] if found else choices.strip()


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "numba", "numpy", "sglang", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """The checkout's commit, "+changes" where the measured files differ from it, "unknown" without git."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD").strip()
    if not commit:
        return "unknown"
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", *_MEASURED)
    return f"{commit}+changes" if changed.strip() else commit


def _output(*command: str) -> str:
    """What the command prints, "" where it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
