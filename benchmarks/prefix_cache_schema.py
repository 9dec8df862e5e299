"""docs/benchmarks/prefix_cache.json. docs/prefix_cache.md explains the keys; a test holds the two
together."""

from __future__ import annotations

import msgspec

from benchmarks.schema import Machine


class TraceLine(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    source: str
    sha256: str
    requests: int
    prompt_tokens: int


class IdealPoint(msgspec.Struct, forbid_unknown_fields=True):
    trace: str
    pool: int
    cached: float
    unlimited: int
    exact: bool


class Point(msgspec.Struct, forbid_unknown_fields=True):
    trace: str
    pool: int
    policy: str
    config: dict[str, float]
    cached: int
    share: float
    lost: dict[str, int]
    eviction_us: float


class Figures(msgspec.Struct, forbid_unknown_fields=True):
    pool: int
    ours_over_ideal: float
    lowest: float
    highest: float
    lead: dict[str, dict[str, float]]
    spread: float


class Ttft(msgspec.Struct, forbid_unknown_fields=True):
    prompt_tokens: int
    miss_ms: float
    hit_ms: float
    ratio: float


class Report(msgspec.Struct, forbid_unknown_fields=True):
    machine: Machine
    traces: list[TraceLine]
    running_slots: int
    pools: list[int]
    coding: Figures
    public: Figures
    ttft: Ttft | None
    ideals: list[IdealPoint]
    points: list[Point]
