"""torch_npu's own stream sanitizer, over work on the emulated device.

It sees each operator by its schema, and streams and events by callbacks of torch_npu's C++ code; neither
needs a device. It works in one thread, so it is switched on from inside the scheduler's.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reports:
    """races: two accesses that no event orders. unrecorded: memory used on a stream that the allocator does
    not know of. launches: operators that were looked at. Lines of the report's head each."""

    races: list[str] = field(default_factory=list)
    unrecorded: list[str] = field(default_factory=list)
    launches: int = 0


def _inside(loop: Any, call: Callable[[], None]) -> None:
    """Run it in the scheduler's thread, between two turns."""
    ingest = loop.scheduler.ingest_requests

    def once() -> None:
        loop.scheduler.ingest_requests = ingest
        call()
        ingest()

    loop.scheduler.ingest_requests = once
    loop.step(2)


def _summary(error: Any) -> str:
    """Which operators, and the line of ours or SGLang's that launched the later one."""
    trace = getattr(error, "current_access", None) or getattr(error, "usage", None)
    frames = [f for f in trace.stack_trace if "/sglang" in f.filename] if trace is not None else []
    where = f"{frames[-1].filename.rpartition('/sglang')[2]}:{frames[-1].lineno}" if frames else "?"
    return f"{trace.operator.partition('(')[0] if trace is not None else error} at {where}"


@contextmanager
def watching(loop: Any, *, deaf: bool = False) -> Iterator[Reports]:
    """Look at everything that the scheduler launches. deaf: waits between streams are not heard."""
    sanitizer = importlib.import_module("torch_npu.npu._sanitizer").npu_sanitizer
    reports = Reports()

    def enable() -> None:
        sanitizer.enable()
        handler = sanitizer.event_handler
        launched = handler._handle_kernel_launch

        def collect(*args: Any, **named: Any) -> list[Any]:
            reports.launches += 1
            reports.races += [_summary(error) for error in launched(*args, **named)]
            return []

        handler._handle_kernel_launch = collect
        if deaf:
            handler.syncs.stream_wait_for_event = lambda stream, event: None

    def disable() -> None:
        sanitizer.dispatch.__exit__(None, None, None)
        sanitizer.dispatch = None

    _inside(loop, enable)
    kept, sys.stderr = sys.stderr, open("/dev/null", "w")  # noqa: SIM115
    try:
        yield reports
    finally:
        sys.stderr.close()
        sys.stderr = kept
        reports.unrecorded += [_summary(error) for error in sanitizer.event_handler.record_stream_errors]
        _inside(loop, disable)
