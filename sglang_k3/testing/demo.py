"""Serves a checkpoint, completes Python code over every HTTP interface, measures it, stops the server.

    python -m sglang_k3.testing.demo --model-path CHECKPOINT [--draft DRAFT] [flags of sglang.launch_server]

Prints texts, TTFT (time to the first token), TPOT (time per token behind it) and what the prefix cache gave.
With a DSpark draft the server speculates, and a second one without it is asked in turn with it at the end.
Exit code 0 when every request was answered, else 1 with the end of the server's log.
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_k3.testing import streams
from sglang_k3.testing.bench_serving import BenchFailed, bench_serving, random_ids
from sglang_k3.testing.server_process import ServerProcess, StartFailed, draft_flags
from sglang_k3.testing.streams import RequestFailed, Streamed
from sglang_k3.training.tiny import SAMPLING

NEW_TOKENS = 64

CODE = 'def read_lines(path, encoding="utf-8"):\n'
FUNCTION = """\
def merge_intervals(self, intervals, *, touching=True):
    merged = []
    for start, end in sorted(intervals):
        if start > end:
            raise ValueError(f"interval {start}..{end} ends before it starts")
        if merged and (start < merged[-1][1] or (touching and start == merged[-1][1])):
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
"""
FIRST_TURN = f"What does this function do?\n```python\n{FUNCTION}```"
SECOND_TURN = f"Complete this function:\n```python\n{CODE}```"

BENCH_REQUESTS, BENCH_CONCURRENCY = 8, 4
COMPARE_ROUNDS = 3


class DemoFailed(RuntimeError):
    """An answer was not what the demo promises to show."""


def _show(console: Console, title: str, answer: Streamed, lead: str = "") -> None:
    cached = f", {answer.cached_tokens} of them from the prefix cache" if answer.cached_tokens else ""
    console.print(Text(title, "bold"))
    console.print(
        f"  {answer.prompt_tokens} prompt tokens{cached}; {answer.new_tokens} new ones, "
        f"TTFT {1e3 * answer.ttft_s:.0f} ms, TPOT {1e3 * answer.tpot_s:.1f} ms",
        highlight=False,
    )
    if answer.reasoning:
        console.print(Text(_indented(answer.reasoning), "italic"))
    console.print(Text(_indented(lead + answer.text), "cyan"))


def _indented(text: str) -> str:
    # A model may write any byte: control characters stay off the terminal.
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return "\n".join(f"  | {line}" for line in shown.rstrip("\n").split("\n"))


def _complete_code(url: str, console: Console) -> None:
    with console.status("/generate ..."):
        answer = streams.generate(url, CODE, {**SAMPLING, "max_new_tokens": NEW_TOKENS})
    _show(console, "/generate, streaming", answer, CODE)
    body: dict[str, Any] = {"model": "default", "prompt": CODE, "max_tokens": NEW_TOKENS, **SAMPLING}
    with console.status("/v1/completions ..."):
        whole = streams.post(f"{url}/v1/completions", body)["choices"][0]["text"]
    console.print(Text("/v1/completions", "bold"))
    console.print(Text(_indented(CODE + whole), "cyan"))
    with console.status("/v1/completions, streaming ..."):
        answer = streams.complete(url, CODE, {"max_tokens": NEW_TOKENS, **SAMPLING})
    _show(console, "/v1/completions, streaming", answer, CODE)


def _chat(url: str, console: Console) -> None:
    """Two turns; the second sends the first again and must find it in the prefix cache."""
    options = {"max_tokens": 2 * NEW_TOKENS, **SAMPLING}
    messages: list[dict[str, Any]] = [{"role": "user", "content": FIRST_TURN}]
    with console.status("/v1/chat/completions ..."):
        first = streams.chat(url, messages, options)
    _show(console, "/v1/chat/completions, streaming, first turn", first)
    messages += [
        {"role": "assistant", "reasoning_content": first.reasoning, "content": first.text},
        {"role": "user", "content": SECOND_TURN},
    ]
    with console.status("/v1/chat/completions, second turn ..."):
        second = streams.chat(url, messages, options)
    _show(console, "/v1/chat/completions, streaming, second turn", second)
    if not second.cached_tokens:
        raise DemoFailed("the second turn found nothing of the first in the prefix cache")


def _show_all(url: str, model: Path, console: Console) -> None:
    _complete_code(url, console)
    _chat(url, console)
    _bench(url, model, console)


def _bench(url: str, model: Path, console: Console) -> None:
    workload = random_ids(256, NEW_TOKENS)
    with console.status("sglang.bench_serving ..."):
        figures = bench_serving(url, model, workload, BENCH_CONCURRENCY, BENCH_REQUESTS)
    title = f"sglang.bench_serving, {workload.name}, {BENCH_REQUESTS} requests, {BENCH_CONCURRENCY} at once"
    table = Table(title=title)
    for heading in ("prompt tokens", "new tokens", "tokens/s", "TTFT median", "TPOT median"):
        table.add_column(heading, justify="right")
    table.add_row(
        str(figures.prompt_tokens),
        str(figures.new_tokens),
        f"{figures.total_tokens_per_second:.0f}",
        f"{figures.median_ttft_ms:.0f} ms",
        f"{figures.median_tpot_ms:.1f} ms",
    )
    console.print(table)


@contextmanager
def _serving(
    model: Path, flags: list[str], log: Path, what: str, console: Console
) -> Iterator[ServerProcess]:
    """A server, with a status line while it starts."""
    with ExitStack() as stack:
        with console.status(f"Starting {what} ...") as status:
            server = ServerProcess(
                *("--model-path", str(model), "--enable-cache-report", *flags),
                log=log,
                on_wait=lambda seconds: status.update(f"Starting {what} ... {seconds:.0f} s"),
            )
            stack.enter_context(server)
        console.print(f"Ready after {server.start_seconds:.0f} s: {what}.", highlight=False)
        yield server


def _compare(plain: str, speculating: str, log: Path, console: Console) -> None:
    """The same greedy requests to both servers, in turn."""
    options = {"temperature": 0.0, "max_new_tokens": 2 * NEW_TOKENS, "ignore_eos": True}
    times: dict[str, list[float]] = {plain: [], speculating: []}
    tokens = steps = 0
    with console.status("With and without the draft ..."):
        for prompt in (CODE, FUNCTION, "import os\n\n\ndef main():\n") * COMPARE_ROUNDS:
            for url in (plain, speculating):
                answer = streams.generate(url, prompt, options)
                times[url].append(answer.tpot_s)
                if url == speculating:
                    tokens += answer.new_tokens - 1
                    steps += answer.verify_steps
    if not steps:
        raise DemoFailed("the server with a draft did not speculate")
    without, with_draft = (1e3 * statistics.median(times[url]) for url in (plain, speculating))
    records = re.search(r"replay records: (.*)", log.read_text(errors="replace"))
    table = Table(title="Speculative decoding, greedy, one request at a time")
    for heading in ("TPOT without", "TPOT with draft", "times faster", "tokens a verify step"):
        table.add_column(heading, justify="right")
    table.add_row(
        f"{without:.1f} ms", f"{with_draft:.1f} ms", f"{without / with_draft:.2f}", f"{tokens / steps:.2f}"
    )
    console.print(table)
    if records:
        console.print(f"Replay records: {records[1]}", highlight=False, soft_wrap=True)


def run(model: Path, draft: Path | None, flags: list[str], console: Console) -> int:
    """The demo with launch_server's further `flags`; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        try:
            if draft is None:
                with _serving(model, flags, log, "the server", console) as server:
                    _show_all(server.url, model, console)
            else:
                drafting = [*flags, *draft_flags(draft)]
                with _serving(model, drafting, log, "the server with its draft", console) as server:
                    _show_all(server.url, model, console)
                    other = Path(folder) / "plain.log"
                    with _serving(model, flags, other, "another one without", console) as plain:
                        _compare(plain.url, server.url, log, console)
            console.print("Servers stopped.")
        except StartFailed as failure:
            console.print(Text(f"Demo failed: {failure}", "bold red"))
            return 1
        except (RequestFailed, BenchFailed, DemoFailed) as failure:
            console.print(Text(log.read_text(errors="replace")[-4000:], "dim"))
            console.print(Text(f"Demo failed: {failure}", "bold red"))
            return 1
    return 0


def main() -> None:
    # A SIGTERM must stop the server too: turn it into an exception that unwinds.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="a DSpark draft for the model")
    known, flags = parser.parse_known_args()
    try:
        sys.exit(run(known.model_path, known.draft, flags, Console()))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
