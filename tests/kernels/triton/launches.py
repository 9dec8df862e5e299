"""Writes what our operators launch at Kimi K3's sizes, for the compile check: python -m ...launches FILE

Run with TRITON_INTERPRET=1. Both tile sizes of KDA are there: which one is launched depends on the batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.kernels.triton.recorder import Launch, recording
from tests.kernels.triton.workloads import workloads

ROOT = Path(__file__).parents[3]


def as_json(launch: Launch) -> dict[str, Any]:
    return {
        "file": str(ROOT / (launch.module.replace(".", "/") + ".py")),
        "kernel": launch.kernel,
        "types": launch.types,
        "constants": launch.constants,
    }


def distinct() -> list[dict[str, Any]]:
    """Each kernel with each set of constants once."""
    found: dict[str, dict[str, Any]] = {}
    for work in workloads():
        with recording(dry=True) as launches:
            work.run()
        for launch in map(as_json, launches):
            found[json.dumps(launch, sort_keys=True)] = launch
            if "BV" in launch["constants"] and "pool" in "".join(launch["types"]):
                half = {**launch, "constants": launch["constants"] | {"BV": launch["constants"]["BV"] // 2}}
                found[json.dumps(half, sort_keys=True)] = half
    return list(found.values())


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(distinct()))
