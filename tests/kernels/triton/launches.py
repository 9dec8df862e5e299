"""Writes what our operators launch at Kimi K3's sizes, for the compile check: python -m ...launches FILE

Run with TRITON_INTERPRET=1. What depends on the batch or the form of the records is there in each way.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.kernels.triton.recorder import Launch, recording
from tests.kernels.triton.workloads import workloads

ROOT = Path(__file__).parents[3]
HALVED = ("decode", "verify", "commit", "verify_block")
"""Kernels of kda whose tile is half as large in a small batch."""


def as_json(launch: Launch) -> dict[str, Any]:
    return {
        "file": str(ROOT / (launch.module.replace(".", "/") + ".py")),
        "kernel": launch.kernel,
        "types": launch.types,
        "constants": launch.constants,
    }


def _variants(launch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The launch, and those that differ by the tile of a small batch, a tail, or a checkpoint on the way."""
    constants = launch["constants"]
    changes: list[dict[str, Any]] = [{}]
    if "BV" in constants and launch["kernel"] in HALVED:
        changes.append({"BV": constants["BV"] // 2})
    if "TAIL" in constants and launch["kernel"] == "verify":
        changes.append({"RING": 2 * constants["WIDTH"], "TAIL": constants["WIDTH"]})
    if "TRACK" in constants:
        changes.append({"TRACK": True})
    yield from ({**launch, "constants": constants | change} for change in changes)


def distinct() -> list[dict[str, Any]]:
    """Each kernel with each set of constants once."""
    found: dict[str, dict[str, Any]] = {}
    for work in workloads():
        with recording(dry=True) as launches:
            work.run()
        for launch in map(as_json, launches):
            for one in _variants(launch):
                found[json.dumps(one, sort_keys=True)] = one
    return list(found.values())


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(distinct()))
