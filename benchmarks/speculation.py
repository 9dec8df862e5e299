"""What replay records save, and what speculation gains on a server.

    python -m benchmarks.speculation [--out DIR] [--kernels-only]

Kernels: one KDA layer of Kimi K3 (96 heads of 128 x 128) at batches of 1, 4 and 16: verify of 8 rows and
commit of 4, beside the form that stores eight states and copies one back, in units of one in-place stream
over the requests' states. Server: the trained tiny target with its draft, and without, two servers side
by side asked in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console

from benchmarks import snapshots
from benchmarks.cases.case import Draw, Sizes
from benchmarks.cases.drafts import ACCEPTED, ROWS
from benchmarks.cases.kda import rows
from benchmarks.machine import cold_bytes, describe, l3_bytes
from benchmarks.measure import Protocol, Subject, measure
from benchmarks.probes import memory_probe
from benchmarks.rotation import rotation
from benchmarks.schema import Machine, save
from benchmarks.stages.models import TINY, TINY_DRAFT
from benchmarks.text import machine_line
from sglang_k3.kernels.kda.record import record_row
from sglang_k3.kernels.registry import Call, choose
from sglang_k3.testing.repetition import before_repetition
from sglang_k3.testing.server_process import ServerProcess, draft_flags
from sglang_k3.testing.streams import Streamed, generate_ids
from sglang_k3.training import tokenizer as bpe
from sglang_k3.training.completions import function_heads
from sglang_k3.training.data import read_corpus
from sglang_k3.training.dataset import SEPARATOR

BATCHES = (1, 4, 16)
SERVED_BATCHES = (1, 4, 8)
CONTEXTS = (256, 1024, 4096)
NEW_TOKENS = 128


class Forms(msgspec.Struct, forbid_unknown_fields=True):
    """One batch size. *_streams: time by that of an in-place stream over the requests' states."""

    requests: int
    valid: bool
    stream_seconds: float
    verify_streams: float
    commit_streams: float
    plain_streams: float
    best: str
    best_streams: float
    snapshot_streams: float
    snapshot_over_best: float


class Point(msgspec.Struct, forbid_unknown_fields=True):
    """x: batch or context. Times a token, median, in ms; accept_length: tokens a verify step."""

    x: int
    plain_ms: float
    speculating_ms: float
    accept_length: float
    speedup: float


class Served(msgspec.Struct, forbid_unknown_fields=True):
    """greedy, sampled: tokens a verify step over the first tokens of held-out continuations, cut where
    they repeat themselves; cut_share: how many were cut. by_batch, by_context: held-out heads, and pieces
    of held-out files."""

    greedy_accept_length: float
    sampled_accept_length: float
    cut_share: float
    by_batch: list[Point]
    by_context: list[Point]


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """docs/benchmarks/speculation.json. record_bytes_per_row, state_bytes: of one layer of one request,
    bf16."""

    machine: Machine
    record_bytes_per_row: int
    conv_bytes_per_row: int
    state_bytes: int
    forms: dict[str, Forms]
    served: Served | None


def forms(requests: int, protocol: Protocol) -> Forms:
    """All forms at one batch size, in one measurement."""
    s = Sizes.full()
    h, d = s.heads, s.head_dim
    draw = Draw()
    inputs: Any = rows(draw, s, requests * ROWS, h, "fp32")
    turning = rotation((draw.normal(requests, h, d, d),), (0,), protocol.cold_bytes)
    slots, spans, bank_rows = (
        torch.arange(requests),
        torch.arange(requests + 1) * ROWS,
        torch.arange(requests),
    )
    bank = [torch.zeros(requests, ROWS, h, d) for _ in range(3)]
    stacked = [part.unsqueeze(0) for part in bank]
    counts, nowhere = torch.full((requests,), ACCEPTED), torch.full((requests,), -1)
    kept = torch.empty(requests, ROWS, h, d, d)
    call = Call("cpu", torch.float32)
    verify, commit = choose("kda.verify", call), choose("kda.commit", call)
    scale = d**-0.5

    def run_verify() -> None:
        (states,) = turning.next()
        verify(*inputs, states, slots, spans, bank_rows, *bank, scale)

    def run_commit() -> None:
        (states,) = turning.next()
        commit(states.unsqueeze(0), slots, bank_rows, *stacked, counts, nowhere, nowhere)

    def run_snapshots() -> None:
        (states,) = turning.next()
        q, k, v, g, beta = inputs
        snapshots.verify(q, k, v, g, beta, states, slots, kept, scale)
        snapshots.restore(states, slots, counts, kept)

    run_verify()
    assert turning.slab is not None
    probe = memory_probe("stream", turning.slab, True, protocol.portion_bytes)
    subjects = [
        Subject("verify", run_verify),
        Subject("commit", run_commit),
        Subject("snapshots", run_snapshots),
    ]
    settled = measure([probe], subjects, protocol)
    times = settled.attempt.times
    states_bytes = 2 * requests * h * d * d * 4
    stream = states_bytes / (settled.attempt.readings["stream"].during * 1e9)
    verified, committed, snapped = (times[name].median / stream for name in ("verify", "commit", "snapshots"))
    plain = verified + committed
    return Forms(
        requests=requests,
        valid=settled.valid,
        stream_seconds=stream,
        verify_streams=verified,
        commit_streams=committed,
        plain_streams=plain,
        best="plain",
        best_streams=plain,
        snapshot_streams=snapped,
        snapshot_over_best=snapped / plain,
    )


def _server(folder: Path, name: str, *flags: str) -> ServerProcess:
    common = ("--model-path", str(TINY), "--device", "cpu", "--dtype", "bfloat16", "--page-size", "16")
    common += ("--max-running-requests", "8", "--max-mamba-cache-size", "48", "--max-total-tokens", "49152")
    return ServerProcess(*common, "--disable-radix-cache", *flags, log=folder / f"{name}.log")


def _ask(url: str, ids: list[int], **sampling: Any) -> Streamed:
    options = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, **sampling}
    return generate_ids(url, ids, options)


def _accept_length(url: str, prompts: list[list[int]], **sampling: Any) -> tuple[float, float]:
    """(tokens a verify step, share of continuations that were cut): each is asked again for just the tokens
    in front of its repetition, so that none of the repetition is counted."""
    tokens = steps = cut = 0
    for ids in prompts:
        whole = _ask(url, ids, **sampling).ids
        length = before_repetition(whole)
        cut += length < len(whole)
        short = _ask(url, ids, **sampling, max_new_tokens=max(2, length))
        tokens += short.new_tokens - 1
        steps += short.verify_steps
    return tokens / max(1, steps), cut / len(prompts)


def _point(
    x: int, plain: ServerProcess, fast: ServerProcess, prompts: list[list[int]], at_once: int
) -> Point:
    """Three rounds of both servers in turn."""
    times: dict[str, list[float]] = {"plain": [], "fast": []}
    accepted = []
    for _ in range(3):
        for name, server in (("plain", plain), ("fast", fast)):
            with ThreadPoolExecutor(at_once) as pool:
                answers = list(pool.map(lambda ids, url=server.url: _ask(url, ids), prompts))
            times[name] += [answer.tpot_s for answer in answers]
            if name == "fast":
                accepted += [(answer.new_tokens - 1) / max(1, answer.verify_steps) for answer in answers]
    slow, quick = (1e3 * statistics.median(times[name]) for name in ("plain", "fast"))
    return Point(x, slow, quick, statistics.fmean(accepted), slow / quick)


def served(console: Console) -> Served:
    tokenizer = bpe.load(TINY)
    held_out = read_corpus().held_out
    heads = [[SEPARATOR, *tokenizer.encode(head).ids] for head in function_heads(held_out)]
    text = [token for name in sorted(held_out) for token in tokenizer.encode(held_out[name][:20_000]).ids]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _server(folder, "plain") as plain, _server(folder, "fast", *draft_flags(TINY_DRAFT)) as fast:
            for server in (plain, fast):
                _ask(server.url, text[:300])
            with console.status("accept length ..."):
                greedy, cut = _accept_length(fast.url, heads)
                sampled, _ = _accept_length(fast.url, heads, temperature=0.8)
            by_batch, by_context = [], []
            for batch in SERVED_BATCHES:
                with console.status(f"batch {batch} ..."):
                    by_batch.append(_point(batch, plain, fast, heads[: max(4, batch)], batch))
            for context in CONTEXTS:
                with console.status(f"context {context} ..."):
                    pieces = [text[i * context : (i + 1) * context] for i in range(3)]
                    by_context.append(_point(context, plain, fast, pieces, 1))
    return Served(greedy, sampled, cut, by_batch, by_context)


def markdown(report: Report) -> str:
    parts = [
        "# Speculation\n",
        f"Written by `python -m benchmarks.speculation`. {machine_line(report.machine)}\n",
        f"A record row of one layer (u, k, g; bf16 activations) has {report.record_bytes_per_row:,} bytes "
        f"and its convolution row {report.conv_bytes_per_row:,}; the state it stands for "
        f"{report.state_bytes:,}.\n",
        f"One KDA layer, 96 heads of 128 x 128, verify of {ROWS} rows and commit of {ACCEPTED}; times in "
        "in-place streams over the requests' states. Snapshots: every state stored, one copied back. It "
        "shows kernels of this CPU, and nothing about an NPU.\n",
        "| requests | verify | commit | together | snapshots | snapshots by best | probes agree |",
        "| --: | --: | --: | --: | --: | --: | --- |",
    ]
    for form in report.forms.values():
        streams = (form.verify_streams, form.commit_streams, form.plain_streams, form.snapshot_streams)
        cells = " | ".join(f"{value:.2f}" for value in (*streams, form.snapshot_over_best))
        parts.append(f"| {form.requests} | {cells} | {'yes' if form.valid else 'no'} |")
    if report.served is not None:
        parts += _served_markdown(report.served)
    return "\n".join(parts) + "\n"


def _served_markdown(found: Served) -> list[str]:
    parts = [
        "\n## Served: tiny-k3 with tiny-k3-dspark, bf16, no prefix cache\n",
        f"Held-out function heads, up to {NEW_TOKENS} tokens: {found.greedy_accept_length:.2f} tokens a "
        f"verify step greedily, {found.sampled_accept_length:.2f} at temperature 0.8, continuations cut "
        f"where they repeat themselves ({found.cut_share:.0%} were). The tables count whole continuations.\n",
    ]
    for title, points in (("requests at once", found.by_batch), ("context", found.by_context)):
        parts += [f"| {title} | plain, ms a token | speculating | times faster | tokens a verify step |"]
        parts += ["| --: | --: | --: | --: | --: |"]
        for p in points:
            figures = (p.plain_ms, p.speculating_ms, p.speedup, p.accept_length)
            parts.append(f"| {p.x} | {' | '.join(f'{value:.2f}' for value in figures)} |")
        parts.append("")
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--kernels-only", action="store_true", help="no servers")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console = Console(file=sys.stderr)
    s = Sizes.full()
    wide = {
        "heads": s.heads,
        "value_dim": s.head_dim,
        "key_dim": s.head_dim,
        "channels": 3 * s.heads * s.head_dim,
    }
    *record, conv = record_row(**wide, activation=torch.bfloat16, window=torch.bfloat16)
    protocol = Protocol(cold_bytes=cold_bytes(l3_bytes()))
    found = {}
    for batch in BATCHES:
        with console.status(f"kernels, batch {batch} ..."):
            found[f"batch{batch}"] = forms(batch, protocol)
    report = Report(
        machine=describe(),
        record_bytes_per_row=sum(field.bytes for field in record),
        conv_bytes_per_row=conv.bytes,
        state_bytes=4 * s.heads * s.head_dim**2,
        forms=found,
        served=None if arguments.kernels_only else served(console),
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    save(report, arguments.out / "speculation.json")
    (arguments.out / "speculation.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
