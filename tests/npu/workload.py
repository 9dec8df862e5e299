"""Thirty greedy requests with what moves a state: chunked prompts, prefix hits, drafts, retraction.

    python -m tests.npu.workload MODEL REQUESTS      a CPU's tokens of the first requests as JSON

The same schedule on either device: turns of the event loop, not times, say when a request comes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DRAFT = ROOT / "examples" / "tiny-k3-dspark"
MARK = "TOKENS "
FLAGS = (
    *("--dtype", "float32", "--page-size", "16", "--chunked-prefill-size", "64"),
    *("--max-running-requests", "6", "--max-mamba-cache-size", "48", "--max-total-tokens", "8192"),
    *("--mamba-track-interval", "64", "--skip-server-warmup"),
)
SPECULATION = ("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(DRAFT))
REQUESTS, NEW_TOKENS = 30, 10
OF_AN_NPU = ("TRITON_INTERPRET", "SGLANG_K3_KERNELS")
"""Variables of a case that the CPU's server is not told."""


def prompts(model: str) -> list[list[int]]:
    """Pieces of SGLang's source; five at a time share their first 80 tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    managers = Path(spec.origin).parent / "srt" / "managers"
    files = (
        *("cache_controller.py", "detokenizer_manager.py", "io_struct.py", "schedule_policy.py"),
        *("scheduler.py", "tokenizer_manager.py"),
    )
    made = []
    for number in range(REQUESTS):
        text = (managers / files[number // 5]).read_text()[:6000]
        ids = tokenizer.encode(text, add_special_tokens=False)
        tail = 200 + 37 * (number % 5)
        made.append(ids[:80] + ids[tail : tail + 9 + 23 * (number % 5)])
    return made


def run(loop: Any, asked: list[list[int]], name: str = "r", retract: bool = True) -> list[Any]:
    """SGLang's requests, finished. They come two turns apart; now and then running ones are taken back."""
    requests = []
    for number, ids in enumerate(asked):
        requests.append(loop.admit(f"{name}{number}", ids, NEW_TOKENS))
        loop.step()
        if retract and number % 5 == 3:
            loop.retract()
    loop.finish(*requests)
    return requests


def tokens(requests: list[Any]) -> list[list[int]]:
    return [list(request.output_ids) for request in requests]


def on_cpu(model: str, requests: int = REQUESTS) -> list[list[int]]:
    """The tokens of the first requests from the CPU server's scheduler, in a process that knows no NPU."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_AN_NPU}
    done = subprocess.run(
        [sys.executable, "-m", "tests.npu.workload", model, str(requests)],
        env=environment | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix(MARK))


def main(model: str, requests: str) -> None:
    from tests.npu import stand_ins

    # transformers would load it, and SGLang then ask for an NPU.
    vars(sys)["modules"]["torch_npu"] = None
    stand_ins.install()
    from sglang_k3.testing.loop import Loop

    loop = Loop("--model-path", model, *FLAGS, *SPECULATION)
    asked = prompts(model)[: int(requests)]
    print(MARK + json.dumps(tokens(run(loop, asked))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
