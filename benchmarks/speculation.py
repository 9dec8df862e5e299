"""What replay records save, and what speculation gains on a server.

    python -m benchmarks.speculation [--out DIR] [--kernels-only]

Kernels: one KDA layer of Kimi K3 (96 heads of 128 x 128) at batches of 1, 4 and 16: a step that verifies 8
rows and accepts 4 in each form of the records, beside the form that stores eight states and copies one back,
in units of one in-place stream over the requests' states. Server: the trained tiny target with its draft, and
without, two servers side by side asked in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
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
from sglang_k3.speculative.record_forms import BOUNDARY, FORMS, Form
from sglang_k3.speculative.replay_records import layer_bytes
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
TAILS = (0, 4, 16, 32, 63)
RING = FORMS["anchored"].ring(ROWS)
DECODE_RINGS = (4, 16)
"""Steps between two writes of the state, if plain decode went through a ring of records."""

BUFFERED_SLOTS = 3
"""Of a running request with SGLang's extra_buffer strategy and overlap: its own, and two buffers."""

TP8_LAYERS, TP8 = 69, 8


class Forms(msgspec.Struct, forbid_unknown_fields=True):
    """One batch size. *_streams: time by that of an in-place stream over the requests' states. plain,
    folded, ring, anchored: a step of each form, on average once their tails repeat. tail_streams: a verify by
    the recorded tokens that it finds between the state and its own, of which none enters the state.
    fold_streams: an anchor's move over a boundary, into another slot. decode_streams: a plain decode step,
    which writes every state; decode_ring_streams: one that reads states and records and writes states once in
    so many steps, on average."""

    requests: int
    valid: bool
    stream_seconds: float
    verify_streams: float
    commit_streams: float
    plain_streams: float
    folded_streams: float
    ring_streams: float
    anchored_streams: float
    fold_streams: float
    tail_streams: dict[str, float]
    best: str
    best_streams: float
    snapshot_streams: float
    snapshot_over_best: float
    decode_streams: float
    decode_ring_streams: dict[str, float]


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
    bf16. request_bytes: records of a running request by form, slot_bytes: one state slot, Kimi K3's 69 layers
    on one of eight ranks. step_bytes: read and written by one request's step in one layer, by form and for
    snapshots, counted from shapes."""

    machine: Machine
    record_bytes_per_row: int
    conv_bytes_per_row: int
    state_bytes: int
    request_bytes: dict[str, int]
    slot_bytes: int
    step_bytes: dict[str, int]
    forms: dict[str, Forms]
    served: Served | None


def forms(requests: int, protocol: Protocol) -> Forms:
    """All forms at one batch size, in one measurement."""
    s = Sizes.full()
    h, d = s.heads, s.head_dim
    draw = Draw()
    inputs: Any = rows(draw, s, requests * ROWS, h, "fp32")
    turning = rotation((draw.normal(requests, h, d, d),), (0,), protocol.cold_bytes)
    slots, bank_rows, singly = torch.arange(requests), torch.arange(requests), torch.arange(requests + 1)
    bank = [draw.normal(requests, RING, h, d, scale=0.1) for _ in range(2)]
    bank.append(s.gate_bound * draw.normal(requests, RING, h, d).sigmoid_())
    stacked = [part.unsqueeze(0) for part in bank]
    start, nowhere = torch.zeros(requests, dtype=torch.int64), torch.full((requests,), -1)
    counts, boundary = torch.full((requests,), ACCEPTED), torch.full((requests,), BOUNDARY)
    kept = torch.empty(requests, ROWS, h, d, d)
    call = Call("cpu", torch.float32)
    verify, commit = choose("kda.verify", call), choose("kda.commit", call)
    scale = d**-0.5

    def run_verify(given: Any, spans: torch.Tensor, tail: int, fold: bool) -> Callable[[], None]:
        """given: new rows, spans [N + 1] of each request."""
        tails, folds = torch.full((requests,), tail), slots if fold else nowhere

        def run() -> None:
            (states,) = turning.next()
            verify(*given, states, slots, spans, bank_rows, *bank, start, tails, folds, scale)

        return run

    single: Any = rows(draw, s, requests, h, "fp32")
    decode = choose("kda.decode", call)

    def run_decode() -> None:
        (states,) = turning.next()
        decode(*single, states, slots, scale)

    def run_commit() -> None:
        (states,) = turning.next()
        commit(states.unsqueeze(0), slots, slots, bank_rows, *stacked, start, counts, nowhere, nowhere)

    def run_fold() -> None:
        (states,) = turning.next()
        commit(
            states.unsqueeze(0), slots, slots.roll(1), bank_rows, *stacked, start, boundary, nowhere, nowhere
        )

    def run_snapshots() -> None:
        (states,) = turning.next()
        q, k, v, g, beta = inputs
        snapshots.verify(q, k, v, g, beta, states, slots, kept, scale)
        snapshots.restore(states, slots, counts, kept)

    found = {form.name: steps_of(form) for form in FORMS.values() if not form.at_once and not form.anchored}
    wanted = {*((tail, False) for tail in TAILS), *(step for steps in found.values() for step in steps)}
    verifies = {step: run_verify(inputs, ROWS * singly, *step) for step in sorted(wanted)}
    last = {ring - 1 for ring in DECODE_RINGS}
    decodes = {
        step: run_verify(single, singly, *step)
        for step in [(0, False), *((tail, fold) for tail in sorted(last) for fold in (False, True))]
    }
    for run in (*verifies.values(), *decodes.values()):
        run()
    assert turning.slab is not None
    probe = memory_probe("stream", turning.slab, True, protocol.portion_bytes)
    subjects = [Subject(f"verify {step}", run) for step, run in verifies.items()]
    subjects += [Subject("commit", run_commit), Subject("fold", run_fold)]
    subjects += [Subject("snapshots", run_snapshots), Subject("decode", run_decode)]
    subjects += [Subject(f"decode {step}", run) for step, run in decodes.items()]
    settled = measure([probe], subjects, protocol)
    states_bytes = 2 * requests * h * d * d * 4
    stream = states_bytes / (settled.attempt.readings["stream"].during * 1e9)
    streams = {name: time.median / stream for name, time in settled.attempt.times.items()}
    by_form = {"plain": streams[f"verify {(0, False)}"] + streams["commit"]}
    for name, steps in found.items():
        by_form[name] = statistics.fmean(streams[f"verify {step}"] for step in steps)
    between = [streams[f"verify {(tail, False)}"] for tail in TAILS]
    # From one boundary to the next a tail has every length; it is folded once in that many steps.
    by_form["anchored"] = float(np.trapezoid(between, TAILS)) / TAILS[-1]
    by_form["anchored"] += streams["fold"] * ACCEPTED / BOUNDARY
    best = min(by_form, key=lambda name: by_form[name])

    def ring_decode(ring: int) -> float:
        """Tails of 0 to ring - 1 tokens; the step that finds the longest writes."""
        begin, end, fold = (streams[f"decode {s}"] for s in ((0, False), (ring - 1, False), (ring - 1, True)))
        return ((ring - 1) * begin + (ring - 2) / 2 * (end - begin) + fold) / ring

    return Forms(
        requests=requests,
        valid=settled.valid,
        stream_seconds=stream,
        verify_streams=streams[f"verify {(0, False)}"],
        commit_streams=streams["commit"],
        plain_streams=by_form["plain"],
        folded_streams=by_form["folded"],
        ring_streams=by_form["ring"],
        anchored_streams=by_form["anchored"],
        fold_streams=streams["fold"],
        tail_streams={str(tail): streams[f"verify {(tail, False)}"] for tail in TAILS},
        best=best,
        best_streams=by_form[best],
        snapshot_streams=streams["snapshots"],
        snapshot_over_best=streams["snapshots"] / by_form[best],
        decode_streams=streams["decode"],
        decode_ring_streams={str(ring): ring_decode(ring) for ring in DECODE_RINGS},
    )


def steps_of(form: Form) -> list[tuple[int, bool]]:
    """(tail, whether it enters the state) that the verifies of a form find, once they repeat, when each step
    accepts ACCEPTED tokens."""
    steps, tail = [], ACCEPTED
    while True:
        fold = tail + 2 * ROWS > form.ring(ROWS)
        steps.append((tail, fold))
        if fold:
            return steps
        tail += ACCEPTED


def _server(folder: Path, name: str, *flags: str) -> ServerProcess:
    common = ("--model-path", str(TINY), "--device", "cpu", "--dtype", "bfloat16", "--page-size", "16")
    common += ("--max-running-requests", "8", "--max-mamba-cache-size", "48", "--max-total-tokens", "49152")
    return ServerProcess(*common, "--disable-radix-cache", *flags, log=folder / f"{name}.log")


def step_bytes(s: Sizes, record: int, conv: int) -> dict[str, int]:
    """Bytes that one request's step reads and writes in one layer, by form and for snapshots. record, conv:
    bytes of a row. Activations are bf16, states fp32."""
    h, d = s.heads, s.head_dim
    state, windows = 4 * h * d * d, (s.conv_width - 1) * conv
    # What every design reads and writes: q, k, v, g, beta and o of the rows, and their convolution.
    rows_bytes = ROWS * (h * (2 * 4 * d + 4 * (d + 1)) + 2 * conv)
    verify = state + rows_bytes + windows + ROWS * (record + conv)
    commit_window = windows + windows
    found = {"plain": verify + commit_window + 2 * state + ACCEPTED * record}
    for form in FORMS.values():
        if not form.at_once and not form.anchored:
            steps = steps_of(form)
            tails = sum(tail for tail, _ in steps) * record
            found[form.name] = verify + commit_window + (tails + state) // len(steps)
    folds = (2 * state + BOUNDARY * record + windows) * ACCEPTED // BOUNDARY
    found["anchored"] = verify + commit_window + (BOUNDARY - 1) * record // 2 + folds
    found["snapshots"] = state + rows_bytes + windows + ROWS * (state + windows) + 2 * (state + windows)
    return found


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
        f"A step of one KDA layer, 96 heads of 128 x 128, that verifies {ROWS} rows and accepts {ACCEPTED}, "
        "fast mode; times in in-place streams over the requests' states. plain: verify, then commit; folded: "
        "the next verify writes the state; ring: every fifth does; anchored: a fold into another slot once "
        f"in {BOUNDARY} tokens, tails of every length between. Snapshots: every state stored, one copied "
        "back. It shows kernels of this CPU, and nothing about an NPU.\n",
        "| batch | verify | commit | plain | folded | ring | anchored | snapshots | by best | best | agree |",
        "| --: | --: | --: | --: | --: | --: | --: | --: | --: | --- | --- |",
    ]
    for form in report.forms.values():
        streams = (form.verify_streams, form.commit_streams, form.plain_streams, form.folded_streams)
        streams += (form.ring_streams, form.anchored_streams, form.snapshot_streams, form.snapshot_over_best)
        cells = " | ".join(f"{value:.2f}" for value in streams)
        parts.append(f"| {form.requests} | {cells} | {form.best} | {'yes' if form.valid else 'no'} |")
    parts += ["", "A verify of 8 rows by the tail that it finds:\n"]
    parts.append("| requests | " + " | ".join(f"{tail} tokens" for tail in TAILS) + " |")
    parts.append("| --: |" + " --: |" * len(TAILS))
    for form in report.forms.values():
        cells = " | ".join(f"{value:.2f}" for value in form.tail_streams.values())
        parts.append(f"| {form.requests} | {cells} |")
    parts += ["", "Plain decode, which writes each state at every token, and through a ring of records:\n"]
    parts.append("| requests | plain | " + " | ".join(f"ring of {ring}" for ring in DECODE_RINGS) + " |")
    parts.append("| --: |" + " --: |" * (1 + len(DECODE_RINGS)))
    for form in report.forms.values():
        values = (form.decode_streams, *form.decode_ring_streams.values())
        parts.append(f"| {form.requests} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    parts += [
        "\nA running request, Kimi K3 on one of eight ranks, bf16; a slot has "
        f"{report.slot_bytes / 1e6:.1f} MB. Slots: its own, and buffers for checkpoints with overlap on. A "
        "step's bytes, read and written by one request in one whole layer, are counted from shapes; "
        "snapshots store a state for each row.\n",
        "| form | records, MB | slots | together, MB | a step, MB | snapshots by it |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    rival = report.step_bytes["snapshots"]
    for name, size in report.request_bytes.items():
        slots, step = (1 if FORMS[name].anchored else BUFFERED_SLOTS), report.step_bytes[name]
        megabytes = (each / 1e6 for each in (size + slots * report.slot_bytes, step))
        cells = " | ".join(f"{value:.1f}" for value in (*megabytes, rival / step))
        parts.append(f"| {name} | {size / 1e6:.1f} | {slots} | {cells} |")
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
    fields = record_row(**wide, activation=torch.bfloat16, window=torch.bfloat16)
    *record, conv = fields
    protocol = Protocol(cold_bytes=cold_bytes(l3_bytes()))
    found = {}
    for batch in BATCHES:
        with console.status(f"kernels, batch {batch} ..."):
            found[f"batch{batch}"] = forms(batch, protocol)
    report = Report(
        machine=describe(),
        record_bytes_per_row=sum(field.bytes for field in record),
        request_bytes={
            form.name: TP8_LAYERS * layer_bytes(fields, ROWS, form, s.conv_width - 1) // TP8
            for form in FORMS.values()
        },
        conv_bytes_per_row=conv.bytes,
        slot_bytes=TP8_LAYERS * (4 * s.heads * s.head_dim**2 + (s.conv_width - 1) * conv.bytes) // TP8,
        step_bytes=step_bytes(s, sum(field.bytes for field in record), conv.bytes),
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
