"""Where the milliseconds of a decode step go: our kernels, our other code, SGLang's.

    python -m benchmarks.decode_step --model-path examples/tiny-k3 --batch 1

SGLang's model runner in this process: the scheduler, the tokenizer and the network are not in it. The step is
timed first, then sampled: a second thread looks a thousand times a second at what the first one is doing, and
counts the innermost frame that is ours or SGLang's (torch's and numba's time is their caller's).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch

from benchmarks.machine import describe
from benchmarks.schema import Machine, save
from benchmarks.text import machine_line
from sglang_k3.testing import runner

PROMPT, WARM_UP, TIMED, SAMPLED = 64, 30, 200, 600
_PERIOD_S = 1e-3
_OURS, _SGLANG = f"{os.sep}sglang_k3{os.sep}", f"{os.sep}sglang{os.sep}"


class Part(msgspec.Struct, forbid_unknown_fields=True):
    owner: str
    where: str
    share: float


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """docs/benchmarks/decode_step.json. step_ms: median; share: of the samples."""

    machine: Machine
    model: str
    batch: int
    step_ms: float
    parts: list[Part]


def classify(frame: FrameType | None) -> tuple[str, str]:
    """(owner, where) of a stack, by its innermost frame that is ours or SGLang's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if _OURS in file:
            return _place(file.partition(_OURS)[2])
        if _SGLANG in file:
            return "SGLang", file.rpartition(_SGLANG)[2].removesuffix(".py")
        frame = frame.f_back
    return "elsewhere", ""


# Shared by all kernels: its time is that of the operator that called.
_SHARED = ("split.py", "row_math.py")


def _place(path: str) -> tuple[str, str]:
    parts = path.split(os.sep)
    if parts[0] == "kernels":
        return "our kernels", parts[1].removesuffix(".py")
    return "our other code", "/".join(parts[:2]).removesuffix(".py")


def of_stack(frame: FrameType | None) -> tuple[str, str]:
    """`classify`, with what the kernels share counted for the operator that called it."""
    owner, where = classify(frame)
    while frame is not None and owner == "our kernels" and f"{where}.py" in _SHARED:
        frame = frame.f_back
        owner, where = classify(frame)
    return owner, where


def sample(work: Callable[[], None]) -> Counter[tuple[str, str]]:
    """Run `work` on this thread while another one looks at it."""
    seen: Counter[tuple[str, str]] = Counter()
    target, done = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not done.wait(_PERIOD_S):
            seen[of_stack(sys._current_frames().get(target))] += 1

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return seen


def measure(model: Path, batch: int, flags: list[str]) -> Report:
    bench = runner.start(str(model), flags)
    prompts = [[(17 * number + i) % 250 for i in range(PROMPT)] for number in range(batch)]
    steps = WARM_UP + TIMED + SAMPLED + 1
    made = [runner.request(number, prompt, steps) for number, prompt in enumerate(prompts)]
    state: dict[str, Any] = {}
    state["tokens"], _, state["batch"] = runner.extend(bench, made)

    def step() -> float:
        began = time.perf_counter()
        state["tokens"] = runner.decode(bench, state["tokens"], state["batch"])
        return time.perf_counter() - began

    times = [step() for _ in range(WARM_UP + TIMED)][WARM_UP:]
    seen = sample(lambda: [step() for _ in range(SAMPLED)].clear())
    total = sum(seen.values())
    parts = [Part(owner, where, count / total) for (owner, where), count in seen.most_common()]
    return Report(describe(), str(model), batch, 1e3 * statistics.median(times), parts)


def markdown(report: Report) -> str:
    owners: dict[str, float] = {}
    for part in report.parts:
        owners[part.owner] = owners.get(part.owner, 0.0) + part.share
    sums = "\n".join(
        f"| {owner} | {share * report.step_ms:.2f} | {share:.0%} |" for owner, share in owners.items()
    )
    rows = "\n".join(
        f"| {part.owner} | {part.where} | {part.share * report.step_ms:.2f} | {part.share:.1%} |"
        for part in report.parts
        if part.share >= 0.01
    )
    return f"""\
# A decode step of {report.model}, batch {report.batch}: {report.step_ms:.2f} ms

Written by `python -m benchmarks.decode_step`: SGLang's model runner alone, without scheduler and network.
A model this small shows the fixed cost of a step, not what a large one computes.

{machine_line(report.machine)}

| owner | ms | share |
| --- | --: | --: |
{sums}

| owner | where | ms | share |
| --- | --- | --: | --: |
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="Further flags go to SGLang.",
        allow_abbrev=False,
    )
    parser.add_argument("--model-path", type=Path, default=Path("examples/tiny-k3"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    known, flags = parser.parse_known_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    defaults = ["--max-total-tokens", "32768", "--max-mamba-cache-size", "32", "--max-running-requests", "16"]
    with torch.inference_mode():
        report = measure(known.model_path, known.batch, defaults + flags)
    known.out.mkdir(parents=True, exist_ok=True)
    stem = known.out / f"decode_step-{known.batch}"
    save(report, stem.with_suffix(".json"))
    stem.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
