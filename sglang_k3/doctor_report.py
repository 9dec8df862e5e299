"""Doctor's findings as a file to attach to a bug report: what the machine and the software are, and nothing
of whose they are."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_k3.doctor import Report, installed

PACKAGES = (
    *(
        "sglang",
        "sglang-k3",
        "sglang-kernel",
        "sglang-router",
        "torch",
        "torch_npu",
        "triton",
        "triton-ascend",
    ),
    *("numba", "numpy", "transformers", "compressed-tensors", "safetensors", "pyzmq", "xgrammar"),
    *("cann-ops-transformer", "sgl-kernel-npu"),
)
VARIABLES = (
    *("SGLANG_PLATFORM", "SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE"),
    *("SGLANG_K3_RECORDS", "SGLANG_K3_KERNELS"),
    *("SGLANG_RAGGED_VERIFY_MODE", "SGLANG_ENABLE_WAR_BARRIER", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"),
    *("NUMBA_NUM_THREADS", "ATEN_CPU_CAPABILITY", "TORCHDYNAMO_DISABLE", "TRITON_INTERPRET"),
    *("ASCEND_RT_VISIBLE_DEVICES", "TASK_QUEUE_ENABLE", "CUDA_VISIBLE_DEVICES"),
)
"""The only ones whose values are told."""


def write(report: Report, path: Path) -> None:
    """Raises OSError where the file cannot be written."""
    path.write_text(json.dumps(contents(report), indent=2) + "\n")


def contents(report: Report) -> dict[str, Any]:
    """JSON types. Texts that others wrote are scrubbed: they may quote paths and names."""
    told = {"healthy": report.healthy, **asdict(report)}
    return {
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "architecture": platform.machine(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "packages": {name: version for name in PACKAGES if (version := installed(name)) is not None},
        "variables": {name: scrubbed(os.environ[name]) for name in VARIABLES if name in os.environ},
        **_scrub(told),
    }


def _scrub(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _scrub(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_scrub(each) for each in value]
    return scrubbed(value) if isinstance(value, str) else value


def scrubbed(text: str) -> str:
    """Of a path its last part, for a user's and a host's name a word."""
    text = re.sub(r"(?<![\w.:/])~?(?:/[^\s/'\"(),:;]+)+/([^\s/'\"(),:;]+)", r".../\1", text)
    for name, word in ((socket.gethostname(), "HOST"), (_user(), "USER")):
        # A name of a letter or two would take words apart.
        if len(name) > 2:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", word, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
