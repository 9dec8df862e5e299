"""Writes docs/ascend-operators.md: what serves each operator on an NPU, and how far it was checked.

python -m tests.npu.table          in any environment with torch; writes the file
"""

from __future__ import annotations

import re
from pathlib import Path

from sglang_k3.kernels import registry
from sglang_k3.kernels.ascend import DEVICE

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "docs" / "ascend-operators.md"

SERVED = {
    *("activation.gated", "attention_residual.block_prepare", "attention_residual.merge_partial"),
    *("attention_residual.mix", "block_attention", "gated_rms_norm", "kda.commit", "kda.decode"),
    *("kda.extend", "kda.gate", "kda.verify", "linear", "linear_batched", "mla.paged_attention"),
    *("moe.experts", "moe.route", "output_gate", "rms_norm", "short_conv.commit", "short_conv.decode"),
    *("short_conv.extend", "short_conv.verify"),
}
"""Operators that the tiny model runs through on the emulated NPU; tests/npu/cases_serving.py compares."""


def source(implementation: registry.Implementation) -> str:
    """The package that the arithmetic comes from."""
    for package in ("sgl_kernel_npu", "torch_npu"):
        if implementation.name.startswith(package):
            return package
    return "torch"


def rows() -> list[tuple[str, ...]]:
    found = []
    for operator in registry.operators():
        for entry in registry.implementations(operator):
            if entry.device != DEVICE:
                continue
            unusable = "situ_and_mul" in entry.name
            checked = bool(re.search(r"npu_\w+", entry.name))
            served = operator in SERVED and not unusable
            found.append(
                (
                    f"`{operator}`",
                    entry.name + (" (refused: no betas)" if unusable else ""),
                    source(entry),
                    "yes" if checked else "no torch_npu call of its own",
                    "yes" if served else "no",
                    "no",
                )
            )
    return found


def text() -> str:
    head = (
        "operator",
        "implementation",
        "source",
        "schema-checked",
        "served on the emulated NPU",
        "run on hardware",
    )
    lines = [
        "# Operators on an Ascend NPU",
        "",
        "Written by `python -m tests.npu.table`. Schema-checked: each torch_npu call was run on the meta",
        "device against the operator's real schema and on the emulated device against the oracle",
        "(`tests/npu/cases_operators.py`). Served: the tiny model ran through it under SGLang's scheduler on",
        "the emulated NPU (`tests/npu/cases_serving.py`). Nothing was run on hardware.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
    ]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows()]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
