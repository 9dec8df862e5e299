"""The prefix cache's report as a table and as curves."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.prefix_cache_schema import Figures, Report
from benchmarks.text import machine_line

_STYLES = {
    "value": ("tab:blue", "-"),
    "lru": ("tab:green", "--"),
    "path-lru": ("tab:olive", "--"),
    "marconi": ("tab:orange", "-"),
    "SGLang": ("tab:red", ":"),
}


def shares(report: Report, kind: str, policy: str) -> list[float]:
    """Mean share of prompt tokens from the cache over a kind's traces, by pool; Marconi's best alpha."""
    names = [trace.name for trace in report.traces if trace.name.startswith(kind)]
    return [
        statistics.fmean(
            max(p.share for p in report.points if (p.trace, p.pool, p.policy) == (name, pool, policy))
            for name in names
        )
        for pool in report.pools
    ]


def ideal_shares(report: Report, kind: str) -> list[float]:
    tokens = {trace.name: trace.prompt_tokens for trace in report.traces if trace.name.startswith(kind)}
    return [
        statistics.fmean(
            p.cached / tokens[p.trace] for p in report.ideals if p.trace in tokens and p.pool == pool
        )
        for pool in report.pools
    ]


def plot(report: Report, path: Path) -> None:
    """Two panels as a PNG: share of prompt tokens from the cache over the slots beside the running ones."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2), ("coding", "public"), strict=True):
        axes.plot(report.pools, ideal_shares(report, kind), "k-", marker="o", label="offline ideal")
        for policy, (colour, style) in _STYLES.items():
            axes.plot(
                report.pools, shares(report, kind, policy), style, color=colour, marker="o", label=policy
            )
        axes.set_title(kind)
        axes.set_xlabel("state slots beside the running requests'")
        axes.set_ylabel("share of prompt tokens from the cache")
        axes.set_xscale("log", base=2)
        axes.set_xticks(report.pools, [f"+{pool}" for pool in report.pools])
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def markdown(report: Report) -> str:
    parts = [
        "# The prefix cache: which states to keep\n",
        f"Written by `python -m benchmarks.prefix_cache`. {machine_line(report.machine)}\n",
        "Share of prompt tokens found in the cache, means over the repeats; +N: state slots beside those of "
        f"the running requests ({report.running_slots}). ideal: the best that can be done knowing every "
        "request, with states at any page. lru: our cache in SGLang's order of states. marconi: the best "
        "alpha of each run, in hindsight. SGLang: its own cache, its own places for states. It shows which "
        "states are kept; of its figures TTFT alone depends on this machine's speed.\n",
    ]
    for kind in ("coding", "public"):
        parts += [f"## {kind}\n", f"| | {' | '.join(f'+{pool}' for pool in report.pools)} |"]
        parts.append(f"| --- |{' --: |' * len(report.pools)}")
        rows = [("ideal", ideal_shares(report, kind))]
        rows += [(policy, shares(report, kind, policy)) for policy in _STYLES]
        parts += [f"| {name} | {' | '.join(f'{share:.1%}' for share in values)} |" for name, values in rows]
        parts.append(_line(getattr(report, kind)))
    for trace in report.traces:
        parts.append(
            f"- {trace.name}: {trace.source}; {trace.requests} requests, {trace.prompt_tokens} prompt "
            f"tokens, SHA-256 {trace.sha256[:16]}"
        )
    times = [p.eviction_us for p in report.points if p.policy == "value" and p.eviction_us]
    if times:
        parts.append(f"\nChoosing by value took {statistics.median(times):.0f} µs (median of the runs).")
    if report.ttft is not None:
        parts.append(
            f"\nTTFT of a prompt of {report.ttft.prompt_tokens} tokens on the tiny server: "
            f"{report.ttft.miss_ms:.0f} ms cold, {report.ttft.hit_ms:.0f} ms on a hit, a ratio of "
            f"{report.ttft.ratio:.2f}."
        )
    return "\n".join([*parts, "", "![Share of prompt tokens from the cache](prefix_cache.png)", ""])


def _line(figures: Figures) -> str:
    leads = "; ".join(
        f"{rival} by {min(by_pool.values()):+.3f} at the closest" for rival, by_pool in figures.lead.items()
    )
    return (
        f"\nAt +{figures.pool} ours found {figures.ours_over_ideal:.3f} of the ideal's tokens "
        f"({figures.lowest:.3f} to {figures.highest:.3f} over the repeats). In parts of the ideal it leads "
        f"{leads}; its own spread over the repeats is at most {figures.spread:.3f}.\n"
    )
