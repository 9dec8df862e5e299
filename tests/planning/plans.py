"""Plans by the command's options, for tests: what is not said is as the command has it."""

from __future__ import annotations

from typing import Any

from sglang_k3.planning.command import make
from sglang_k3.planning.report import Plan

_OPTIONS = {
    "tp": 1, "dp": 1, "ep": 1, "model_path": None, "context": 131072, "draft": "none", "records": None,
    "accept_length": 4.0, "cache_strategy": None, "checkpoints": None, "cached_tokens": 0,
    "dtype": "bfloat16", "state_dtype": "float32", "kv_dtype": "auto", "experts": "checkpoint", "page_size": None, "chunk": 8192,
    "host_gib": 0.0,
}  # fmt: skip


def planned(
    device: str = "950dt",
    concurrency: int | None = None,
    figures: dict[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """Raises PlanError; TypeError for an option that the command does not have."""
    if unknown := options.keys() - _OPTIONS.keys():
        raise TypeError(f"no such options: {unknown}")
    return make(device, figures or {}, _OPTIONS | options, concurrency)
