"""The named figures of a report, computed from its entries."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import counts
from benchmarks.cases.kda import prefill_name
from benchmarks.cases.moe import expert_name
from benchmarks.schema import Entry, KdaDecode, KdaPrefill, Mxfp4, Peer


def kda_decode(entries: Sequence[Entry]) -> KdaDecode | None:
    """The in-place stream's time over the states alone, over the time of a decode step."""
    entry = _fast(entries, "kda_decode")
    if entry is None:
        return None
    shape = entry.shape
    states = counts.kda_state_traffic(shape["requests"], shape["heads"], shape["K"], shape["V"])
    stream_seconds = states / (entry.readings["stream"].during * 1e9)
    return KdaDecode(
        stream_ratio=stream_seconds / entry.seconds,
        seconds=entry.seconds,
        implementation=entry.implementation,
    )


def kda_prefill(entries: Sequence[Entry], peers: Sequence[Peer]) -> KdaPrefill | None:
    """From the longest prefill, the one of half its length, and those that transformers' rule ran beside."""
    ours = {
        entry.shape["tokens"]: entry
        for entry in entries
        if entry.operator == "kda.extend" and "fast" in entry.modes
    }
    if not ours:
        return None
    longest = max(ours)
    half = ours.get(longest // 2)
    beside = {
        tokens: _seconds(peers, prefill_name(tokens), "transformers") / entry.seconds
        for tokens, entry in ours.items()
        if _has(peers, prefill_name(tokens), "transformers")
    }
    shorter = min(beside, default=None)
    whole = longest if longest in beside and longest != shorter else None
    return KdaPrefill(
        matmul_ratio=ours[longest].compute_ratio,
        linearity=ours[longest].seconds / 2 / half.seconds if half else None,
        speedup_vs_transformers=None if shorter is None else beside[shorter],
        transformers_tokens=shorter,
        speedup_vs_transformers_full=None if whole is None else beside[whole],
        transformers_full_tokens=whole,
    )


def mxfp4(entries: Sequence[Entry], peers: Sequence[Peer]) -> Mxfp4 | None:
    """How many times faster a packed expert is than torch's linears of the same shapes."""

    def against(dtype: str, rows: int) -> float | None:
        entry = _fast(entries, expert_name(rows))
        return entry and _seconds(peers, entry.case, f"torch linear {dtype}") / entry.seconds

    figures = Mxfp4(
        batch1_vs_bf16=against("bf16", 1),
        rows16_vs_bf16=against("bf16", 16),
        rows64_vs_bf16=against("bf16", 64),
        batch1_vs_fp32=against("fp32", 1),
    )
    return figures if figures.batch1_vs_bf16 is not None else None


def _fast(entries: Sequence[Entry], case: str) -> Entry | None:
    return next((entry for entry in entries if entry.case == case and "fast" in entry.modes), None)


def _has(peers: Sequence[Peer], case: str, name: str) -> bool:
    return any(peer.case == case and peer.name == name for peer in peers)


def _seconds(peers: Sequence[Peer], case: str, name: str) -> float:
    (seconds,) = (peer.seconds for peer in peers if peer.case == case and peer.name == name)
    return seconds
