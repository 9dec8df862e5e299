"""Writes docs/kernels-figures.md: bytes of each kernel, its tiles, and whether they fit each target.

python -m tests.kernels.triton.figures        needs `make npu-compiler`; some minutes
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sglang_k3.kernels.triton_targets import TARGETS
from tests.kernels.triton import compiler

DOCUMENT = compiler.ROOT / "docs" / "kernels-figures.md"
HEAD = """# Figures of our Triton kernels

Written by `python -m tests.kernels.triton.figures`. **Not run on hardware**: bytes are counted in Triton's
interpreter, fits are what ascendnpu-ir 1.2.0 plans, and times are bytes by announced bandwidth, a bound that
nobody has measured.

"""


def counted() -> list[dict[str, Any]]:
    """Of each workload: name, ranks, minimum, loaded and stored bytes. Runs where Triton interprets."""
    from tests.kernels.triton.recorder import recording
    from tests.kernels.triton.workloads import workloads

    found = []
    for work in workloads():
        with recording() as launches:
            work.run()
        moved = {
            "loaded": sum(one.loaded.total() for one in launches),
            "stored": sum(one.stored.total() for one in launches),
        }
        found.append({"name": work.name, "ranks": work.ranks, "minimum": work.minimum} | moved)
    return found


def _bytes(folder: Path) -> list[str]:
    subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.figures", str(folder / "counted.json")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=compiler.ROOT,
        check=True,
    )
    times = " | ".join(f"{one.name} at {one.bandwidth:,} GB/s, us" for one in TARGETS)
    lines = [
        f"| operator | ranks | loaded | stored | minimum | of the minimum | {times} |",
        "|" + " --- |" * 8,
    ]
    for row in json.loads((folder / "counted.json").read_text()):
        moved = row["loaded"] + row["stored"]
        each = " | ".join(f"{moved / one.bandwidth / 1e3:.2f}" for one in TARGETS)
        lines.append(
            f"| `{row['name']}` | {row['ranks'] or 'any'} | {row['loaded']:,} | {row['stored']:,} "
            f"| {row['minimum']:,} | {moved / row['minimum']:.3f} | {each} |"
        )
    return lines


def _fits(folder: Path) -> list[str]:
    command = [sys.executable, "-m", "tests.kernels.triton.launches", str(folder / "found.json")]
    subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=compiler.ROOT, check=True)
    launches = json.loads((folder / "found.json").read_text())
    seen: dict[tuple[str, str], dict[str, bool]] = defaultdict(dict)
    for launch, path in zip(launches, compiler.lower(launches, folder), strict=True):
        constants = ", ".join(f"{name} {value}" for name, value in launch["constants"].items())
        for one in TARGETS:
            outcome = compiler.compile_for(path, one, double_buffers=True)
            seen[f"{Path(launch['file']).parent.name}.{launch['kernel']}", constants][one.name] = outcome.ok
    heads = " | ".join(f"{one.name}, {one.on_chip >> 10} KB" for one in TARGETS)
    lines = [f"| kernel | constants | {heads} |", "|" + " --- |" * (2 + len(TARGETS))]
    for (kernel, constants), fits in seen.items():
        answers = " | ".join("twice" if fits[one.name] else "no" for one in TARGETS)
        lines.append(f"| `{kernel}` | {constants} | {answers} |")
    return lines


def text() -> str:
    if not compiler.available():
        raise SystemExit(compiler.MISSING)
    with TemporaryDirectory() as name:
        folder = Path(name)
        parts = [
            "## Bytes of one call\n",
            *_bytes(folder),
            "\n## Buffers on the chip\n",
            "Whether every buffer of the launch fits twice, so that loads run beside work.\n",
            *_fits(folder),
        ]
    return HEAD + "\n".join(parts) + "\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(counted()))
    else:
        DOCUMENT.write_text(text())
