"""Marconi's rule (Pan et al., MLSys 2025, arXiv 2411.19379, section 4.2), as a rival to our own.

A state's utility is recency(n) + alpha · efficiency(n), each scaled to 0..1 over the states that may go;
efficiency is the computation that a hit saves beside the next state above, by the bytes of state and KV.
Nodes with more than one child stay. Here the computation is this server's measured cost, where the paper
counts FLOPs, and alpha is a setting, where the paper tunes it by replaying requests; the benchmark gives it
the best alpha of each run, in hindsight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_k3.prefix_cache.eviction import Eviction, Node, Surroundings, depth_of, path_up


class Marconi(Eviction):
    """alpha: weight of efficiency against recency; 0 is LRU."""

    def __init__(self, around: Surroundings, alpha: float = 1.0) -> None:
        self._around, self._alpha = around, alpha
        self._clock = 0
        self._used: dict[Node, int] = {}

    def started(self, request: Any, node: Node | None, kv: int) -> None:
        self._clock += 1
        used = next((above for above in path_up(node) if self._around.holds(above)), None)
        if used is not None:
            self._used[used] = self._clock

    def kept(self, request: Any, node: Node) -> None:
        self._used[node] = self._clock

    def dropped(self, node: Node) -> None:
        self._used.pop(node, None)

    def clear(self) -> None:
        self._used.clear()

    def victim(self, states: Sequence[Node]) -> Node:
        narrow = [node for node in states if len(node.children) <= 1] or states
        recency = _scaled([float(self._used.get(node, 0)) for node in narrow])
        efficiency = _scaled([self._efficiency(node) for node in narrow])
        scores = [r + self._alpha * e for r, e in zip(recency, efficiency, strict=True)]
        return narrow[scores.index(min(scores))]

    def _efficiency(self, node: Node) -> float:
        end, start = depth_of(node), 0
        for above in path_up(node.parent):
            if self._around.holds(above):
                start = depth_of(above)
                break
        size = self._around.state_bytes + self._around.token_bytes * (end - start)
        return self._around.cost.between(start, end) / size


def _scaled(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]
