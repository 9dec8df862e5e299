"""What the roofline knows of a device: published peaks, and assumptions that say so."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from sglang_k3.planning.errors import PlanError

GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class Device:
    """One rank's device. `kind` is torch's device type, as --device takes it.

    memory: bytes. reserve: bytes that the runtime keeps for itself. bandwidth, link: bytes a second, of its
    memory and one way to other ranks. flops: dense products in bf16, a second. launch, collective: seconds
    that an operator and a collective take beyond their bytes. communicator: bytes of one group's buffers.
    """

    name: str
    kind: str
    memory: int
    reserve: int
    bandwidth: float
    flops: float
    link: float
    launch: float
    collective: float
    communicator: int
    sources: tuple[str, ...]


_ASSUMED = (
    "launch and collective times are assumptions, not measurements",
    "HCCL keeps two buffers of 200 MiB (HCCL_BUFFSIZE) for each group of ranks",
)

DEVICES = {
    "a3": Device(
        name="Atlas A3 (one die of a 910C)",
        kind="npu",
        memory=64 * GIB,
        reserve=3 * GIB,
        bandwidth=1.6e12,
        flops=376e12,
        link=196e9,
        launch=10e-6,
        collective=20e-6,
        communicator=400 * _MIB,
        sources=("a 910C has two dies, 128 GB, 3.2 TB/s and 784 GB/s between chips, as announced", *_ASSUMED),
    ),
    "950pr": Device(
        name="Ascend 950PR",
        kind="npu",
        memory=int(112e9),
        reserve=4 * GIB,
        bandwidth=1.4e12,
        flops=500e12,
        link=1e12,
        launch=10e-6,
        collective=15e-6,
        communicator=400 * _MIB,
        sources=(
            "112 GB as the Atlas 350 card is sold; the chip was announced with 128 GB and 1.6 TB/s: "
            "pass --memory-gib and --bandwidth for another card",
            "2 TB/s between chips, both ways; bf16 taken as half of the announced 1 PFLOPS in FP8",
            *_ASSUMED,
        ),
    ),
    "950dt": Device(
        name="Ascend 950DT",
        kind="npu",
        memory=int(144e9),
        reserve=4 * GIB,
        bandwidth=4e12,
        flops=500e12,
        link=1e12,
        launch=10e-6,
        collective=15e-6,
        communicator=400 * _MIB,
        sources=(
            "144 GB, 4 TB/s, 2 TB/s between chips (both ways), as announced; bf16 taken as half of the "
            "announced 1 PFLOPS in FP8",
            *_ASSUMED,
        ),
    ),
    "cpu": Device(
        name="CPU",
        kind="cpu",
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        reserve=2 * GIB,
        bandwidth=40e9,
        flops=0.5e12,
        link=10e9,
        launch=20e-6,
        collective=600e-6,
        communicator=0,
        sources=(
            "memory is this machine's, shared by its ranks; all speeds are assumptions: pass --bandwidth "
            "and others as measured",
        ),
    ),
    "custom": Device(
        name="custom device",
        kind="npu",
        memory=0,
        reserve=0,
        bandwidth=0.0,
        flops=0.0,
        link=0.0,
        launch=10e-6,
        collective=20e-6,
        communicator=400 * _MIB,
        sources=("as passed", *_ASSUMED),
    ),
}

# Not served by this project: here so that the roofline can be held against more published figures.
B300 = Device(
    name="B300",
    kind="cuda",
    memory=int(288e9),
    reserve=0,
    bandwidth=8e12,
    flops=2.25e15,
    link=900e9,
    launch=1e-6,
    collective=8e-6,
    communicator=0,
    sources=("8 TB/s, 2.25 PFLOPS dense in bf16, as announced",),
)

_NEEDED = {"memory": "--memory-gib", "bandwidth": "--bandwidth", "flops": "--tflops", "link": "--link"}


def device(
    name: str,
    *,
    memory_gib: float | None = None,
    bandwidth: float | None = None,
    tflops: float | None = None,
    link: float | None = None,
    launch_us: float | None = None,
    collective_us: float | None = None,
) -> Device:
    """The named device with what the caller knows better. bandwidth and link: GB a second.

    Raises PlanError for a name that is unknown and for a custom device that lacks a figure.
    """
    found = DEVICES.get(name.lower())
    if found is None:
        raise PlanError(f"unknown device {name!r}: pass one of {', '.join(DEVICES)}")
    given = {
        "memory": None if memory_gib is None else int(memory_gib * GIB),
        "bandwidth": _scaled(bandwidth, 1e9),
        "flops": _scaled(tflops, 1e12),
        "link": _scaled(link, 1e9),
        "launch": _scaled(launch_us, 1e-6),
        "collective": _scaled(collective_us, 1e-6),
    }
    given = {key: value for key, value in given.items() if value is not None}
    result = replace(found, **given)
    for key, value in given.items():
        if value < 0 or (key in _NEEDED and value == 0):
            raise PlanError(f"device {name}: {key} {value:g} must be greater than 0")
    missing = [option for key, option in _NEEDED.items() if not getattr(result, key)]
    if missing:
        raise PlanError(f"device {name} lacks figures: add {', '.join(missing)}")
    if result.memory <= result.reserve:
        raise PlanError(
            f"device {name}: --memory-gib {result.memory / GIB:g} is no more than the "
            f"{result.reserve / GIB:g} GiB that its runtime keeps: pass more"
        )
    if given:
        said = f"passed by the caller: {', '.join(given)}"
        result = replace(result, sources=(*result.sources, said))
    return result


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit
