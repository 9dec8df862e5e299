"""Cases that run in the NPU tier's own environment: `make test-npu`, which says which files share a process.
SGLang keeps one configuration a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

# Nothing of torch_npu here: `make test` reads this file too.


@pytest.fixture(scope="session")
def emulator() -> Any:
    from tests.npu import device

    return device.start()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The example checkpoint with unpacked experts, which any chip can serve."""
    from tests.npu import dense
    from tests.npu.workload import ROOT

    target: Path = tmp_path_factory.mktemp("dense")
    dense.unpack(ROOT / "examples" / "tiny-k3", target)
    return str(target)


@pytest.fixture(scope="session")
def speculating(emulator, model: str) -> Any:
    """The scheduler with a draft on the emulated NPU, for all files of a process."""
    from sglang_k3.testing.loop import Loop
    from tests.npu.workload import FLAGS, SPECULATION

    return Loop("--model-path", model, *FLAGS, *SPECULATION, device="npu")
