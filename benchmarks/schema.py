"""The JSON file of a measurement. docs/benchmarks.md explains every key; a test holds the two together."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

R = TypeVar("R")

VERSION = 1
"""Goes up when a key changes its meaning: files of two versions are not compared."""


class Machine(msgspec.Struct, forbid_unknown_fields=True):
    cpu: str
    cores: int
    l3_bytes: int | None
    memory_bytes: int
    threads: int
    torch_capability: str
    huge_pages: str
    load_average: float
    system: str
    versions: dict[str, str]
    commit: str
    date: str


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    regime: str
    rounds: int
    cold_bytes: int
    probe_samples: int
    probe_tolerance: float
    attempts_allowed: int
    only: list[str]


class Reading(msgspec.Struct, forbid_unknown_fields=True):
    """A probe around and during one case. Rates in 1e9 bytes or operations a second."""

    probe: str
    before: float
    after: float
    during: float
    during_spread: float
    peak: float
    disagreement: float


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    case: str
    operator: str
    modes: list[str]
    implementation: str
    dtype: str
    shape: dict[str, int]
    seconds: float
    spread: float
    samples: list[float]
    calls_per_sample: int
    bytes_moved: int
    flops: int
    gbytes_per_second: float
    gflops_per_second: float
    memory_ratio: float
    compute_ratio: float | None
    limit: str
    ratio: float
    readings: dict[str, Reading]
    cold_bytes: int
    attempts: int
    valid: bool
    note: str


class Peer(msgspec.Struct, forbid_unknown_fields=True):
    """Somebody else's way to the same result, measured in the same rounds."""

    case: str
    name: str
    dtype: str
    seconds: float
    spread: float
    samples: list[float]
    calls_per_sample: int
    valid: bool


class KdaDecode(msgspec.Struct, forbid_unknown_fields=True):
    stream_ratio: float
    seconds: float
    implementation: str


class KdaPrefill(msgspec.Struct, forbid_unknown_fields=True):
    matmul_ratio: float | None
    linearity: float | None
    speedup_vs_transformers: float | None
    transformers_tokens: int | None
    speedup_vs_transformers_full: float | None
    transformers_full_tokens: int | None


class Mxfp4(msgspec.Struct, forbid_unknown_fields=True):
    batch1_vs_bf16: float | None
    rows16_vs_bf16: float | None
    rows64_vs_bf16: float | None
    batch1_vs_fp32: float | None


class Report(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    valid: bool
    machine: Machine
    settings: Settings
    probes: dict[str, Reading]
    kda_decode: KdaDecode | None
    kda_prefill: KdaPrefill | None
    mxfp4: Mxfp4 | None
    entries: list[Entry]
    peers: list[Peer]


def save(report: msgspec.Struct, path: Path) -> None:
    """Any report of benchmarks/, as readable JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def load(path: Path, kind: type[R] = Report) -> R:
    """Raises OSError, or msgspec.DecodeError for a file that is no report of that kind."""
    return msgspec.json.decode(path.read_bytes(), type=kind)
