"""Measures cases one after another and makes the report of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from benchmarks import machine
from benchmarks.cases.case import DTYPES, Case
from benchmarks.headline import kda_decode, kda_prefill, mxfp4
from benchmarks.measure import Clock, Protocol, Settled, Subject, measure
from benchmarks.probes import MATMUL_PROBES, MEMORY_PROBES, Probe, matmul_probe, memory_probe
from benchmarks.rotation import Rotation, rotation
from benchmarks.schema import VERSION, Entry, Peer, Reading, Report, Settings
from sglang_k3.kernels import registry
from sglang_k3.kernels.registry import Call, Implementation, NoImplementation

Resolve = Callable[[str, Call], tuple[Implementation, object]]

COMPUTE_FROM = 1.0
"""Operations a byte from which a matrix product rate can be the limit: below, memory always is."""


def run(
    cases: Sequence[Case],
    settings: Settings,
    protocol: Protocol,
    *,
    resolve: Resolve = registry.resolve,
    clock: Clock = time.perf_counter,
    begin: Callable[[str], None] = lambda case: None,
) -> Report:
    """The report of `cases`. `begin` is told the name of each case before it is measured.

    `resolve` chooses implementations (tests wrap it), `clock` gives seconds.
    """
    described = machine.describe()
    compute = {name: matmul_probe(name, protocol.matmul_size) for name in MATMUL_PROBES}
    begin("probes")
    start = _rates(compute, protocol, clock)
    entries: list[Entry] = []
    peers: list[Peer] = []
    for case in cases:
        begin(case.name)
        case_entries, case_peers = _run_case(case, compute, protocol, resolve, clock)
        entries += case_entries
        peers += case_peers
    begin("probes")
    end = _rates(compute, protocol, clock)
    probes = {name: _whole_run(start[name], end[name]) for name in start}
    return Report(
        version=VERSION,
        valid=all(entry.valid for entry in entries),
        machine=described,
        settings=settings,
        probes=probes,
        kda_decode=kda_decode(entries),
        kda_prefill=kda_prefill(entries, peers),
        mxfp4=mxfp4(entries, peers),
        entries=entries,
        peers=peers,
    )


def _rates(compute: dict[str, Probe], protocol: Protocol, clock: Clock) -> dict[str, Reading]:
    """Every probe alone: memory over a slab of nothing, and the matrix products."""
    slab = torch.zeros(protocol.cold_bytes, dtype=torch.uint8)
    memory = [memory_probe(name, slab, True, protocol.portion_bytes) for name in MEMORY_PROBES]
    return measure([*memory, *compute.values()], [], protocol, clock).attempt.readings


def _whole_run(start: Reading, end: Reading) -> Reading:
    """One reading whose before and after are the run's first and last."""
    low, high = sorted((start.during, end.during))
    return Reading(
        probe=start.probe,
        before=start.during,
        after=end.during,
        during=(start.during + end.during) / 2,
        during_spread=max(start.during_spread, end.during_spread),
        peak=max(start.peak, end.peak),
        disagreement=high / low - 1,
    )


def _run_case(
    case: Case, compute: dict[str, Probe], protocol: Protocol, resolve: Resolve, clock: Clock
) -> tuple[list[Entry], list[Peer]]:
    turning = rotation(case.make(), case.cold, protocol.cold_bytes, case.expand)
    chosen = implementations(case, resolve)
    subjects = [_subject(name, function, turning) for name, (function, _) in chosen.items()]
    for peer in case.peers:
        arguments, cold = peer.make()
        own = rotation(arguments, cold, protocol.cold_bytes)
        subjects.append(_subject(_peer_key(peer.name), peer.function, own, peer.rounds))
    probes = _probes(case, turning, compute, protocol)
    settled = measure(probes, subjects, protocol, clock)
    entries = [_entry(case, name, modes, turning, settled) for name, (_, modes) in chosen.items()]
    return entries, [_peer(case, peer.name, peer.dtype, settled) for peer in case.peers]


def implementations(case: Case, resolve: Resolve) -> dict[str, tuple[Callable[..., object], list[str]]]:
    """Name -> (function, the modes it serves), as the registry chooses for the case.

    A mode that no implementation takes (exact, for some operators in bf16) is left out; raises
    NoImplementation where none is left.
    """
    chosen: dict[str, tuple[Callable[..., object], list[str]]] = {}
    refusal: NoImplementation | None = None
    for mode in case.modes:
        call = Call("cpu", DTYPES[case.dtype], exact=mode == "exact")
        try:
            found = resolve(case.operator, call)[0]
        except NoImplementation as error:
            refusal = error
            continue
        chosen.setdefault(found.name, (found.function, []))[1].append(mode)
    if refusal is not None and not chosen:
        raise refusal
    return chosen


def _subject(
    name: str, function: Callable[..., object], turning: Rotation, rounds: int | None = None
) -> Subject:
    return Subject(name, lambda: function(*turning.next()), rounds)


def _peer_key(name: str) -> str:
    return f"peer: {name}"


def _probes(case: Case, turning: Rotation, compute: dict[str, Probe], protocol: Protocol) -> list[Probe]:
    """The case's memory probe over its own slab, and matrix products where they can be the limit."""
    assert turning.slab is not None, f"{case.name} keeps nothing cold"
    floats = all(turning.calls[0][index].dtype == torch.float32 for index in case.cold)
    probes = [memory_probe(case.traffic, turning.slab, floats, protocol.portion_bytes)]
    if case.flops >= COMPUTE_FROM * case.bytes_moved:
        probes.append(compute["matmul_fp32"])
        if case.dtype == "bf16":
            probes.append(compute["matmul_bf16"])
    return probes


def _entry(case: Case, name: str, modes: list[str], turning: Rotation, settled: Settled) -> Entry:
    times, readings = settled.attempt.times[name], settled.attempt.readings
    gbytes, gflops = case.bytes_moved / times.median / 1e9, case.flops / times.median / 1e9
    memory_ratio = gbytes / readings[case.traffic].during
    # A bf16 operator may compute in fp32: its limit is the faster of the two.
    compute_rates = [readings[probe].during for probe in MATMUL_PROBES if probe in readings]
    compute_ratio = gflops / max(compute_rates) if compute_rates else None
    ratio = max(memory_ratio, compute_ratio or 0.0)
    return Entry(
        case=case.name,
        operator=case.operator,
        modes=modes,
        implementation=name,
        dtype=case.dtype,
        shape=case.shape,
        seconds=times.median,
        spread=times.spread,
        samples=times.samples,
        calls_per_sample=times.calls,
        bytes_moved=case.bytes_moved,
        flops=case.flops,
        gbytes_per_second=gbytes,
        gflops_per_second=gflops,
        memory_ratio=memory_ratio,
        compute_ratio=compute_ratio,
        limit="memory" if ratio == memory_ratio else "compute",
        ratio=ratio,
        readings=readings,
        cold_bytes=turning.cold_bytes,
        attempts=settled.attempts,
        valid=settled.valid,
        note=case.note,
    )


def _peer(case: Case, name: str, dtype: str, settled: Settled) -> Peer:
    times = settled.attempt.times[_peer_key(name)]
    return Peer(
        case=case.name,
        name=name,
        dtype=dtype,
        seconds=times.median,
        spread=times.spread,
        samples=times.samples,
        calls_per_sample=times.calls,
        valid=settled.valid,
    )
