"""One emulated NPU for this process, with everything that SGLang needs to start on it."""

from __future__ import annotations

from functools import cache

from tests.npu import doubles, stand_ins
from tests.npu.emulator import Emulator


@cache
def start() -> Emulator:
    """Stand-ins, torch_npu's operators on host memory, doubles of launched kernels. Import SGLang after."""
    stand_ins.install()
    emulator = Emulator()
    emulator.install()
    doubles.install()
    return emulator
