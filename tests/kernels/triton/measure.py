"""Times our Triton kernels on an Ascend NPU and writes JSON. Nobody has run it on one yet.

python -m tests.kernels.triton.measure FILE.json

Each operator at Kimi K3's sizes with 16 requests, over so many copies of its tensors that no cache holds
them; medians of 15 rounds. Launches follow one another without a wait, so the host's time a launch counts
where it is the longer one.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from sglang_k3.kernels.ascend import chip
from sglang_k3.kernels.triton_targets import target
from tests.kernels.triton.workloads import Workload, workloads

ROUNDS, REQUESTS = 15, 16
COLD_BYTES = 1 << 30
"""More than twice the caches of any target."""
MOST_COPIES = 64


def copies(make: Callable[[], list[Workload]], index: int) -> list[Workload]:
    """The index-th workload as often as keeps it out of the caches."""
    first = make()[index]
    wanted = min(MOST_COPIES, -(-COLD_BYTES // first.minimum))
    return [first, *(make()[index] for _ in range(wanted - 1))]


def seconds(works: list[Workload], device: str, rounds: int = ROUNDS) -> list[float]:
    """Of one call, round by round, after one that compiles; each round goes over all copies."""
    wait = (lambda: None) if device == "cpu" else torch.get_device_module(device).synchronize
    works[0].run()
    taken = []
    for _ in range(rounds):
        wait()
        begin = perf_counter()
        for work in works:
            work.run()
        wait()
        taken.append((perf_counter() - begin) / len(works))
    return taken


def rows(device: str, names: set[str] | None = None, rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """One row an operator; names: these operators alone."""
    with torch.device(device):
        for index, work in enumerate(workloads(REQUESTS)):
            if names is None or work.name in names:
                works = [work] if device == "cpu" else copies(lambda: workloads(REQUESTS), index)
                taken = seconds(works, device, rounds)
                median = statistics.median(taken)
                yield {
                    "operator": work.name,
                    "ranks": work.ranks,
                    "copies": len(works),
                    "minimum_bytes": work.minimum,
                    "microseconds": [round(1e6 * one, 2) for one in taken],
                    "median_microseconds": round(1e6 * median, 2),
                    "share_of_bandwidth": round(work.minimum / median / (target().bandwidth * 1e9), 4),
                }


def main(file: Path) -> None:
    if not chip():
        raise SystemExit("no Ascend NPU is to be seen here (torch.npu.is_available()): nothing was measured")
    report = {"chip": chip(), "target": target().name, "torch": torch.__version__, "rows": list(rows("npu"))}
    file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
