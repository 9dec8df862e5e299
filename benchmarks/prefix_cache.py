"""Which states to keep: policies by size of the state pool, on a coding trace and a public trace format.

    python -m benchmarks.prefix_cache [--out DIR] [--trace FILE] [--repeats 3] [--pools 6,12,24,48]
    [--no-ttft]

Every policy is asked the same requests, one behind the other, through SGLang's real scheduler, pools and tree
with a stand-in for the model's arithmetic (`benchmarks.prefix_cache_play`). The best that could be known
beforehand is computed beside them (`benchmarks.prefix_cache_ideal`). TTFT comes from a real server.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from transformers import AutoTokenizer

from benchmarks import prefix_cache_traces as traces
from benchmarks.machine import ROOT, describe
from benchmarks.prefix_cache_ideal import ideal
from benchmarks.prefix_cache_play import Order, Played
from benchmarks.prefix_cache_report import markdown, plot
from benchmarks.prefix_cache_schema import Figures, IdealPoint, Point, Report, TraceLine, Ttft
from benchmarks.schema import save
from benchmarks.stages.models import TINY
from sglang_k3.testing import streams
from sglang_k3.testing.server_process import ServerProcess
from sglang_k3.training import tokenizer as bpe
from sglang_k3.training.data import Corpus, read_corpus

RUNNING = 2
SLOTS_EACH = 3
"""Slots of a running request: its own state, and two that keep checkpoints while it runs."""
POOLS = (6, 12, 24, 48)
DEFAULT_POOL = 24
PAGE, CHUNK = 16, 512
ALPHAS = (0.5, 1.0, 2.0, 4.0)
OURS, SGLANG, STOCK = "value", "lru", "SGLang"
POLICIES: tuple[tuple[str, dict[str, float]], ...] = (
    (OURS, {}),
    (SGLANG, {}),
    ("path-lru", {}),
    *(("marconi", {"alpha": alpha}) for alpha in ALPHAS),
)


def flags(pool: int, stock: bool) -> list[str]:
    """launch_server's. stock: SGLang's own cache, with its own places for states."""
    made = ["--model-path", str(TINY), "--dtype", "float32", "--page-size", str(PAGE)]
    made += ["--max-running-requests", str(RUNNING), "--max-total-tokens", "200000"]
    made += ["--max-mamba-cache-size", str(RUNNING * SLOTS_EACH + pool)]
    made += ["--chunked-prefill-size", str(CHUNK), "--mamba-track-interval", "64"]
    return [*made, "--radix-cache-backend", "sglang"] if stock else made


def make_traces(repeats: int, given: Path | None, folder: Path) -> list[traces.Trace]:
    """A coding and a public trace for each repeat, named `coding 7` and so on; a given file stands alone."""
    corpus, text = read_corpus(), bpe.load(TINY)
    made = []
    for seed in range(traces.SEED, traces.SEED + repeats):
        one = traces.coding(text, corpus, seed)
        made.append(msgspec.structs.replace(one, name=f"coding {seed}"))
        if given is None:
            path = folder / f"agentic-{seed}.json"
            traces.write_agentic(path, corpus, seed=seed)
            made.append(_public(path, f"public {seed}", corpus))
    if given is not None:
        made.append(_public(given, f"public {given.stem}", corpus))
    return made


def _public(path: Path, name: str, corpus: Corpus) -> traces.Trace:
    text = bpe.load(TINY)
    if path.suffix == ".jsonl":
        one = traces.mooncake(path, text.get_vocab_size())
    else:
        one = traces.agentic(path, AutoTokenizer.from_pretrained(str(TINY)), text, corpus)
    return msgspec.structs.replace(one, name=name)


def play(order: Order, folder: Path) -> list[Played]:
    """In a process of its own. Raises RuntimeError with the end of what it wrote."""
    asked, answered = folder / "order.json", folder / "played.json"
    asked.write_bytes(msgspec.json.encode(order))
    command = [sys.executable, "-m", "benchmarks.prefix_cache_play", str(asked), str(answered)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the play ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return msgspec.json.decode(answered.read_bytes(), type=list[Played])


def measure(made: list[traces.Trace], pools: tuple[int, ...], console: Console) -> list[Point]:
    points = []
    by_name = {trace.name: trace for trace in made}
    with tempfile.TemporaryDirectory() as name:
        for pool in pools:
            for stock in (False, True):
                policies = [(STOCK, {})] if stock else list(POLICIES)
                with console.status(f"+{pool} slots, {'SGLang' if stock else 'our'} cache ..."):
                    played = play(Order(flags(pool, stock), made, policies), Path(name))
                for one in played:
                    each = 1e6 * one.eviction_seconds / one.evictions if one.evictions else 0.0
                    trace = by_name[one.trace]
                    share = sum(one.cached) / trace.prompt_tokens
                    points.append(
                        Point(one.trace, pool, one.policy, one.config, sum(one.cached), share, one.lost, each)
                    )
    return points


def ideals(made: list[traces.Trace], pools: tuple[int, ...]) -> list[IdealPoint]:
    """A running request holds its own slots; what is cached has the rest."""
    points = []
    for trace in made:
        for pool in pools:
            found = ideal(trace, pool + (RUNNING - 1) * SLOTS_EACH, PAGE)
            points.append(IdealPoint(trace.name, pool, found.cached, found.unlimited, found.exact))
    return points


def cached(points: list[Point], trace: str, pool: int, policy: str) -> int:
    """Marconi's is that of its best alpha for this trace and pool."""
    return max(p.cached for p in points if (p.trace, p.pool, p.policy) == (trace, pool, policy))


def figures(points: list[Point], best: list[IdealPoint], kind: str, pools: tuple[int, ...]) -> Figures:
    names = [name for name in dict.fromkeys(p.trace for p in points) if name.startswith(kind)]
    at = {(p.trace, p.pool): p.cached for p in best}
    default = DEFAULT_POOL if DEFAULT_POOL in pools else pools[-1]
    ratios = [cached(points, name, default, OURS) / at[name, default] for name in names]
    behind: dict[str, dict[str, float]] = {}
    for rival in (STOCK, SGLANG, "path-lru", "marconi"):
        worst = {}
        for pool in pools:
            leads = [
                (cached(points, name, pool, OURS) - cached(points, name, pool, rival)) / at[name, pool]
                for name in names
            ]
            worst[f"+{pool}"] = statistics.fmean(leads)
        behind[rival] = worst
    spread = max(
        (
            max(shares) - min(shares)
            for pool in pools
            if (shares := [cached(points, name, pool, OURS) / at[name, pool] for name in names])
        ),
        default=0.0,
    )
    return Figures(default, ratios[0], min(ratios), max(ratios), behind, spread)


def ttft(rounds: int, folder: Path) -> Ttft:
    """A prompt of 4,100 tokens cold, and again with another end, on the real server."""
    common = ["--device", "cpu", "--max-running-requests", "2", "--max-mamba-cache-size", "30"]
    common += ["--model-path", str(TINY), "--dtype", "bfloat16", "--page-size", str(PAGE)]
    common += ["--max-total-tokens", "32768", "--chunked-prefill-size", str(CHUNK)]
    ids = [i for name in sorted(read_corpus().held_out) for i in bpe.load(TINY).encode(name).ids]
    text = [(place * 31 + ids[place % len(ids)]) % 1500 for place in range(200 * rounds + 8300)]
    miss, hit = [], []
    with ServerProcess(*common, log=folder / "server.log") as server:
        sampling = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
        for number in range(-1, rounds):
            prompt = text[100 * (number + 2) : 100 * (number + 2) + 4096]
            first = streams.generate_ids(server.url, [number + 2, *prompt], sampling)
            again = streams.generate_ids(server.url, [number + 2, *prompt, *text[-40:]], sampling)
            if number >= 0:
                miss.append(1e3 * first.ttft_s)
                hit.append(1e3 * again.ttft_s)
    median_miss, median_hit = statistics.median(miss), statistics.median(hit)
    return Ttft(4097, median_miss, median_hit, median_hit / median_miss)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument(
        "--trace", type=Path, help="agentic-trace .json or mooncake .jsonl in the public's place"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pools", default=",".join(map(str, POOLS)))
    parser.add_argument("--requests", type=int, help="the first so many of each trace: a trial")
    parser.add_argument("--no-ttft", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    pools = tuple(int(pool) for pool in arguments.pools.split(","))
    console = Console(file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        made = make_traces(arguments.repeats, arguments.trace, Path(name))
        if arguments.requests is not None:
            made = [msgspec.structs.replace(t, requests=t.requests[: arguments.requests]) for t in made]
        best = ideals(made, pools)
        points = measure(made, pools, console)
        waits = None if arguments.no_ttft else ttft(5, Path(name))
    report = Report(
        machine=describe(),
        traces=[TraceLine(t.name, t.source, t.sha256, len(t.requests), t.prompt_tokens) for t in made],
        running_slots=RUNNING * SLOTS_EACH,
        pools=list(pools),
        coding=figures(points, best, "coding", pools),
        public=figures(points, best, "public", pools),
        ttft=waits,
        ideals=best,
        points=points,
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    save(report, arguments.out / "prefix_cache.json")
    plot(report, arguments.out / "prefix_cache.png")
    text = markdown(report)
    (arguments.out / "prefix_cache.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
