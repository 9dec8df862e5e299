"""How decoding grows: by context, by batch, and by the number of experts a step touches.

    python -m benchmarks.scaling

Context: one request on the real server behind prompts of 1k to 64k tokens, once with three KDA layers to
each MLA layer, once with as few KDA layers as a Kimi model may have (one). Batch: that many requests at once
behind short prompts. Experts: the grouped MXFP4 operator alone, at a fixed number of rows.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console

from benchmarks.machine import describe
from benchmarks.schema import Machine, save
from benchmarks.text import machine_line
from sglang_k3.kernels.registry import Call, choose
from sglang_k3.models.config import K3Config
from sglang_k3.testing.random_checkpoint import k3_config, make
from sglang_k3.testing.server_process import ServerProcess
from sglang_k3.testing.streams import Streamed, generate_ids

CONTEXTS = (1_000, 4_000, 16_000, 32_000, 64_000)
BATCHES = (1, 2, 4, 8, 16)
TOUCHED = (1, 2, 4, 8, 16, 32, 64)
NEW_TOKENS = 48
EXPERT_ROWS, EXPERT_TOP, EXPERT_ROUNDS = 64, 1, 9
_LATENT, _INNER, _EXPERTS = 1024, 1024, 64

# Small, because 64k tokens have to be prefilled first: a quarter of an hour with 8 MLA heads in 7 layers.
_LAYERS, _HEADS = 4, 4
_SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "max_position_embeddings": 80_000,
}
_FULL = {"3 KDA : 1 MLA": (4,), "1 KDA : 3 MLA": (2, 3, 4)}


class Point(msgspec.Struct, forbid_unknown_fields=True):
    """token_ms: median time per token. request_bytes: state slot and cache rows of one request."""

    x: int
    token_ms: float
    request_bytes: int


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """docs/benchmarks/scaling.json. experts: x experts touched by EXPERT_ROWS rows, time of one call."""

    machine: Machine
    by_context: dict[str, list[Point]]
    by_batch: list[Point]
    experts: list[Point]


def overrides(full: tuple[int, ...]) -> dict[str, Any]:
    """Config keys of the variant whose layers `full` (from 1) are MLA."""
    linear = {
        "full_attn_layers": list(full),
        "kda_layers": [layer for layer in range(1, _LAYERS + 1) if layer not in full],
        "num_heads": _HEADS,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    }
    return {**_SIZES, "linear_attn_config": linear}


def request_bytes(config: K3Config, tokens: int, element: int = 2) -> int:
    """Bytes that a request of so many tokens holds: fp32 S and windows of each KDA layer, and cache rows.

    element: bytes of the model's dtype.
    """
    kda, mla = config.kda, config.mla
    kda_layers = sum(config.is_kda(layer) for layer in range(config.num_layers))
    state = 4 * kda.num_heads * kda.head_dim**2
    window = element * (kda.conv_kernel_size - 1) * 3 * kda.projection_size
    row = element * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    return kda_layers * (state + window) + (config.num_layers - kda_layers) * row * tokens


def _prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


def _decode(url: str, length: int, seed: int) -> Streamed:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return generate_ids(url, _prompt(length, seed), sampling)


def _server(model: Path, folder: Path) -> ServerProcess:
    flags = ("--model-path", str(model), "--device", "cpu", "--dtype", "bfloat16", "--page-size", "16")
    flags += ("--max-total-tokens", "80000", "--max-running-requests", "16", "--max-mamba-cache-size", "96")
    return ServerProcess(*flags, "--chunked-prefill-size", "4096", log=folder / "server.log")


def serve(full: tuple[int, ...], batches: bool, console: Console) -> tuple[list[Point], list[Point]]:
    """Points by context, and by batch where asked for, of one variant."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = overrides(full)
        model = make("k3", folder / "model", dtype="bfloat16", experts="mxfp4", text_config=keys)
        config = K3Config.from_hf(k3_config("bfloat16", "mxfp4", keys))
        with _server(model, folder) as server:
            _decode(server.url, 300, 0)
            contexts = []
            for length in CONTEXTS:
                with console.status(f"context of {length} ..."):
                    times = [_decode(server.url, length, length).tpot_s for _ in range(3)]
                token = 1e3 * statistics.median(times)
                contexts.append(Point(length, token, request_bytes(config, length)))
                console.print(f"context {length}: {token:.1f} ms a token")
            points = []
            for batch in BATCHES if batches else ():
                with ThreadPoolExecutor(batch) as pool:
                    answers = list(pool.map(lambda i: _decode(server.url, 300, 1000 + i), range(batch)))
                token = 1e3 * statistics.median(answer.tpot_s for answer in answers)
                points.append(Point(batch, token, request_bytes(config, 300)))
                console.print(f"batch {batch}: {token:.1f} ms a token")
    return contexts, points


def experts() -> list[Point]:
    """EXPERT_ROWS rows, one expert each, over so many different experts; the packed weights are cold."""
    generator = torch.Generator().manual_seed(0)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    scale = [torch.full((_EXPERTS, r, c // 32), 120, dtype=torch.uint8) for r, c in _MATRICES]
    packed = [codes(_EXPERTS, r, c // 2) for r, c in _MATRICES]
    run = choose("moe.experts_mxfp4", Call("cpu", torch.bfloat16))
    x = torch.randn(EXPERT_ROWS, _LATENT, generator=generator).bfloat16()
    weights = torch.ones(EXPERT_ROWS, EXPERT_TOP)
    points = []
    for touched in TOUCHED:
        ids = (torch.arange(EXPERT_ROWS) % touched)[:, None]
        times = []
        for _ in range(EXPERT_ROUNDS):
            began = time.perf_counter()
            run(x, ids, weights, packed[0], scale[0], packed[1], scale[1], 4.0, 25.0)
            times.append(time.perf_counter() - began)
        size = touched * sum(r * c // 2 + r * c // 32 for r, c in _MATRICES)
        points.append(Point(touched, 1e3 * statistics.median(times[1:]), size))
    return points


_MATRICES = ((2 * _INNER, _LATENT), (_LATENT, _INNER))


def markdown(report: Report) -> str:
    parts = [
        "# Scaling of decode\n",
        f"{(__doc__ or '').partition('benchmarks.scaling')[2].strip()} Written by "
        "`python -m benchmarks.scaling`. A generated model of 4 layers and hidden size 512: its shape is "
        "meant, not its milliseconds.\n",
        machine_line(report.machine) + "\n",
        "![scaling](scaling.png)\n",
        "| context | " + " | ".join(f"{name}: ms a token | memory" for name in report.by_context) + " |",
        "| --: |" + " --: | --: |" * len(report.by_context),
    ]
    for row in zip(*report.by_context.values(), strict=True):
        cells = " | ".join(f"{p.token_ms:.1f} | {p.request_bytes / 2**20:.1f} MiB" for p in row)
        parts.append(f"| {row[0].x} | {cells} |")
    parts += ["", "| requests at once | ms a token |", "| --: | --: |"]
    parts += [f"| {p.x} | {p.token_ms:.1f} |" for p in report.by_batch]
    parts += ["", f"| experts touched by {EXPERT_ROWS} rows | ms a call | packed weights read |"]
    parts += ["| --: | --: | --: |"]
    parts += [f"| {p.x} | {p.token_ms:.2f} | {p.request_bytes / 2**20:.1f} MiB |" for p in report.experts]
    return "\n".join(parts) + "\n"


def plot(report: Report, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4), layout="constrained")
    context, memory, batch, touched = figure.subplots(1, 4)
    for name, points in report.by_context.items():
        xs = [p.x for p in points]
        context.plot(xs, [p.token_ms for p in points], "o-", label=name)
        memory.plot(xs, [p.request_bytes / 2**20 for p in points], "o-", label=name)
    batch.plot([p.x for p in report.by_batch], [p.token_ms for p in report.by_batch], "o-")
    touched.plot([p.x for p in report.experts], [p.token_ms for p in report.experts], "o-")
    for axes, x, y in (
        (context, "context, tokens", "ms a token"),
        (memory, "context, tokens", "MiB a request"),
        (batch, "requests at once", "ms a token"),
        (touched, f"experts touched by {EXPERT_ROWS} rows", "ms a call"),
    ):
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_ylim(bottom=0)
    context.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console = Console(file=sys.stderr)
    by_context: dict[str, list[Point]] = {}
    by_batch: list[Point] = []
    for name, full in _FULL.items():
        console.print(name)
        by_context[name], points = serve(full, not by_batch, console)
        by_batch = by_batch or points
    report = Report(describe(), by_context, by_batch, experts())
    arguments.out.mkdir(parents=True, exist_ok=True)
    save(report, arguments.out / "scaling.json")
    (arguments.out / "scaling.md").write_text(markdown(report))
    plot(report, arguments.out / "scaling.png")
    print(markdown(report))


if __name__ == "__main__":
    main()
