"""What `sglang-k3 doctor` finds out: versions, registrations, platform, kernel choices, self-test.

Everything is looked at even when something before it is wrong, so one run names all that is amiss. Nothing
is imported before it is looked for: the report must come out with no torch and no SGLang installed.
"""

from __future__ import annotations

import contextlib
import os
import platform as python_platform
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing import get_context
from typing import Any

import sglang_k3
from sglang_k3 import doctor_machine, registration, upstream
from sglang_k3.platforms.served import served_device

_WORKER_LIMIT_S = 300


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `detail` says what was found, and what to do where it is wrong."""

    area: str
    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Choice:
    """The implementation of one operator for one kind of call, and why others before it were refused. behind:
    those for the device that were not asked, in the order in which they would be."""

    operator: str
    call: str
    implementation: str | None
    refusals: tuple[str, ...]
    behind: tuple[str, ...] = ()


@dataclass
class Report:
    findings: list[Finding] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    chosen_for: str = ""

    @property
    def healthy(self) -> bool:
        return all(finding.ok for finding in self.findings)

    def add(self, area: str, name: str, ok: bool, detail: str) -> None:
        self.findings.append(Finding(area, name, ok, detail))


def examine() -> Report:
    """Look at everything. Takes about 20 seconds, most of them SGLang's imports."""
    report = Report()
    # It starts anew, as SGLang's workers do, and takes as long as what is looked at here meanwhile.
    worker = ProcessPoolExecutor(1, get_context("spawn"))
    loaded = worker.submit(_lost) if installed("sglang") is not None else None
    try:
        _examine(report, loaded)
    finally:
        worker.shutdown(wait=False, cancel_futures=True)
    return report


def _examine(report: Report, loaded: Future[list[str]] | None) -> None:
    for name, ok, detail in _versions():
        report.add("versions", name, ok, detail)
    if installed("torch") is None:
        return
    if loaded is not None:
        report.add("platform", "selected", *_platform())
        for name, ok, detail in _registrations(loaded):
            report.add("registrations", name, ok, detail)
        for name, ok, detail in doctor_machine.sockets():
            report.add("sockets", name, ok, detail)
        report.add("machine", "memory", *doctor_machine.memory())
    _kernels(report)


def installed(distribution: str) -> str | None:
    """Its version, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[tuple[str, bool, str]]:
    yield "sglang-k3", True, sglang_k3.__version__
    yield "python", True, python_platform.python_version()
    for name in ("torch", "numba"):
        version = installed(name)
        yield name, version is not None, version or "not installed: pip install 'sglang-k3[cpu]'"
    try:
        registration.check_version()
        yield "sglang", True, f"{upstream.VALIDATED_SGLANG}, the validated version"
    except upstream.UpstreamError as error:
        yield "sglang", False, str(error)


def _platform() -> tuple[bool, str]:
    """Whether SGLang selected our platform in this process, and why."""
    try:
        from sglang.srt.platforms import current_platform

        # A lazy object: asking for the device resolves it.
        selected = f"{type(current_platform).__name__} ({current_platform.device_type})"
        ours = served_device() is not None
    except Exception as error:
        return False, f"SGLang could not select a platform: {type(error).__name__}: {error}"
    return ours, f"{selected}: {_why_platform()}"


def _why_platform() -> str:
    from sglang_k3 import platforms

    for variable in ("SGLANG_PLATFORM", "SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE"):
        if value := os.environ.get(variable):
            return f"{variable}={value} is set"
    if platforms.activate() is None:
        if served_device() == "npu":
            return "an NPU is present: SGLang's platform stays, and our classes serve Kimi models on it"
        return "a GPU is present, and this release serves on CPUs and Ascend NPUs"
    return "neither an NPU nor a GPU is present"


def _registrations(loaded: Future[list[str]]) -> Iterator[tuple[str, bool, str]]:
    """Of this process, as of the one that reads a server's arguments; and of one that was spawned, as its
    workers are."""
    try:
        elsewhere = loaded.result(_WORKER_LIMIT_S)
    except Exception as error:
        elsewhere = [f"{type(error).__name__}: {error}"]
    for name, lost in (("plugin", _lost()), ("plugin in a worker", elsewhere)):
        for line in lost:
            yield name, False, line
        if not lost:
            count = f"{len(registration.hooks())} hooks and {len(registration.changes())} changes"
            yield name, True, f"{count} are in force"


def _lost() -> list[str]:
    """Load the plugins as each of SGLang's processes does, then ask every hook and change whether it took."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            from sglang.srt.plugins import load_plugins

            load_plugins()
            return registration.failures()
        except (Exception, SystemExit) as error:
            return [f"{type(error).__name__}: {error}"]


def _kernels(report: Report) -> None:
    try:
        from sglang_k3 import self_test
        from sglang_k3.kernels import registry

        operators = registry.operators()
        report.add("kernels", "order", *_order())
    except Exception as error:
        report.add("kernels", "registry", False, f"{type(error).__name__}: {error}")
        return
    report.chosen_for = "a CPU" if _device() == "cpu" else f"an NPU, {_KIMI_K3}"
    for operator in operators:
        for name, call in _calls().items():
            report.choices.append(choice := _choose(operator, name, call))
            if choice.implementation is None:
                report.add("kernels", operator, False, f"{name}: {'; '.join(choice.refusals)}")
    for outcome in self_test.run():
        detail = outcome.failure or f"max error {outcome.error:.1e} against the reference"
        if not outcome.ok and outcome.failure is None:
            detail += f", more than {self_test.TOLERANCE:.0e}"
        report.add("self-test", f"{outcome.operator} / {outcome.implementation}", outcome.ok, detail)


def _device() -> str:
    """What this host would serve on."""
    return "npu" if installed("sglang") is not None and served_device() == "npu" else "cpu"


def _order() -> tuple[bool, str]:
    """Whether this host can ask kernels in the order that SGLANG_K3_KERNELS wants, and what that is.

    Raises ValueError for an unknown value: then nothing can be chosen.
    """
    from sglang_k3.kernels import order, registry

    first = order.first()
    try:
        order.check(_device())
    except ValueError as error:
        return False, str(error)
    if first is None:
        default = "each operator's own"
        if _device() == "cpu":
            return True, default
        return True, f"{default}; {order.VARIABLE}={order.TRITON} asks our Triton kernels first"
    names = {
        operator: {entry.name for entry in registry.implementations(operator)}
        for operator in registry.operators()
    }
    without = ", ".join(operator for operator, there in names.items() if first not in there)
    return True, f"{order.VARIABLE}={first}: our Triton kernels first; there is none of {without}"


_K3_SIZES = {"K": 128, "V": 128, "taps": 4, "gate_bound": -5}
_K3_SIZES |= {"heads": 6, "latent": 512, "rope": 64, "page": 128}
_KIMI_K3 = "Kimi K3 on 16 ranks with pages of 128"


def _calls() -> dict[str, Any]:
    """The three ways a CPU server is run; or on an NPU the two of its own, at Kimi K3's sizes."""
    import torch

    from sglang_k3.kernels.registry import Call

    if _device() == "npu":
        types = {"fp32": torch.float32, "bf16": torch.bfloat16}
        return {name: Call("npu", dtype, dims=_K3_SIZES) for name, dtype in types.items()}
    return {
        "fp32 exact": Call("cpu", torch.float32, exact=True),
        "fp32 fast": Call("cpu", torch.float32),
        "bf16 fast": Call("cpu", torch.bfloat16),
    }


def _choose(operator: str, name: str, call: Any) -> Choice:
    from sglang_k3.kernels import registry

    try:
        chosen, refused = registry.resolve(operator, call)
    except registry.NoImplementation:
        refusals = ((entry.name, entry.refusal(call)) for entry in registry.implementations(operator))
        return Choice(operator, name, None, tuple(f"{entry}: {reason}" for entry, reason in refusals))
    shown = chosen.name + (f" (takes from the host: {chosen.host})" if chosen.host else "")
    entries = registry.implementations(operator)
    behind = entries[entries.index(chosen) + 1 :]
    return Choice(
        operator,
        name,
        shown,
        tuple(f"{entry}: {reason}" for entry, reason in refused),
        tuple(entry.name for entry in behind if entry.device == call.device),
    )
