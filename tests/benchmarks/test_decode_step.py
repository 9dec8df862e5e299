"""A step's time is told apart by whose code was running."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from benchmarks.decode_step import Part, Report, markdown, of_stack, sample
from benchmarks.machine import describe


def stack(*files: str) -> Any:
    """Frames of these files, the innermost last."""
    frame = None
    for file in files:
        frame = SimpleNamespace(f_code=SimpleNamespace(co_filename=file), f_back=frame)
    return frame


def test_the_innermost_frame_of_ours_or_sglangs_counts() -> None:
    scheduler = "/x/site-packages/sglang/srt/model_executor/model_runner.py"
    model, torch = "/x/sglang_k3/models/kimi_k3.py", "/x/site-packages/torch/nn/functional.py"
    kernel = "/x/sglang_k3/kernels/linear/cpu.py"
    assert of_stack(stack(scheduler, torch)) == ("SGLang", "srt/model_executor/model_runner")
    assert of_stack(stack(scheduler, model, torch)) == ("our other code", "models/kimi_k3")
    assert of_stack(stack(scheduler, model, kernel, torch)) == ("our kernels", "linear")
    assert of_stack(stack("/x/threading.py")) == ("elsewhere", "")
    assert of_stack(None) == ("elsewhere", "")


def test_what_kernels_share_counts_for_the_operator() -> None:
    kernel, shared = "/x/sglang_k3/kernels/moe/packed_cpu.py", "/x/sglang_k3/kernels/split.py"
    assert of_stack(stack(kernel, shared)) == ("our kernels", "moe")
    assert of_stack(stack(kernel, "/x/sglang_k3/kernels/row_math.py", "/x/torch/a.py")) == (
        "our kernels",
        "moe",
    )


def test_a_running_thread_is_sampled() -> None:
    seen = sample(lambda: time.sleep(0.05))
    assert sum(seen.values()) > 3


def test_shares_become_milliseconds() -> None:
    parts = [Part("our kernels", "linear", 0.75), Part("SGLang", "srt/x", 0.25)]
    text = markdown(Report(describe(), "m", 1, 8.0, parts))
    assert "| our kernels | 6.00 | 75% |" in text
    assert "| SGLang | srt/x | 2.00 | 25.0% |" in text
