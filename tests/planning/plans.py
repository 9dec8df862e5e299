"""Plans for tests: what is not said is as the command has it."""

from __future__ import annotations

from typing import Any

from sglang_k3.planning.options import Options, make
from sglang_k3.planning.report import Plan


def planned(device: str = "950dt", concurrency: int | None = None, **options: Any) -> Plan:
    """Raises PlanError."""
    return make(Options(device, concurrency=concurrency, **options))
