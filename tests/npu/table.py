"""Writes docs/ascend-operators.md: what serves each operator on an NPU, and how far it was checked.

python -m tests.npu.table          in any environment with torch; writes the file
"""

from __future__ import annotations

from pathlib import Path

from sglang_k3.kernels import registry
from sglang_k3.kernels.ascend import DEVICE

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "docs" / "ascend-operators.md"

SERVED = {
    ("activation.gated", "torch_npu npu_swiglu, SiTU in torch"),
    ("kda.extend", "npu torch, chunks of 16"),
    ("moe.experts", "torch_npu npu_grouped_matmul"),
    ("moe.route", "torch_npu npu_moe_gating_top_k"),
    ("rms_norm", "torch_npu npu_rms_norm"),
    ("rotary", "torch_npu npu_rotary_mul"),
    *(
        (operator, "npu torch")
        for operator in (
            *("acceptance.chain", "attention_residual.block_prepare", "attention_residual.merge_partial"),
            *("attention_residual.mix", "block_attention", "gated_rms_norm", "kda.commit", "kda.decode"),
            *("kda.gate", "kda.verify", "linear", "linear_batched", "mla.paged_attention", "output_gate"),
            *("short_conv.commit", "short_conv.decode", "short_conv.extend", "short_conv.verify"),
        )
    ),
}
"""What the tiny model runs through on an emulated A3; tests/npu/cases_serving.py compares."""

SERVED_ON_A_950 = {
    ("mla.paged_attention", "torch_npu npu_fused_infer_attention_score_v2"),
    ("moe.experts_mxfp4", "torch_npu, unpacked weights"),
}
"""And on an emulated 950, with the checkpoint's packed experts; tests/npu/cases_vendor.py compares."""

OURS = "ours, in Triton"

INTERPRETED = {
    *("acceptance.chain", "activation.gated", "attention_residual.block_prepare"),
    *("attention_residual.merge_norm", "attention_residual.merge_partial", "attention_residual.mix"),
    *(
        "attention_residual.mix_norm",
        "gated_rms_norm",
        "kda.commit",
        "kda.decode",
        "kda.extend",
        "kda.verify",
        "mla.paged_attention",
    ),
    *("short_conv.commit", "short_conv.decode", "short_conv.extend", "short_conv.verify"),
}
"""Operators that our Triton kernels serve in Triton's interpreter, where SGLANG_K3_KERNELS puts them first;
tests/npu/cases_triton.py and cases_triton_decode.py compare."""

NEVER_TAKEN = {
    "sgl_kernel_npu situ_and_mul": "no betas",
    "CANN flash_mla_with_kvcache": "SGLang's pool has two parts",
}
"""Refused on every call today, and why."""


def source(implementation: registry.Implementation) -> str:
    """The package that the arithmetic comes from."""
    for package in ("sgl_kernel_npu", "torch_npu", "CANN"):
        if implementation.name.startswith(package):
            return package
    return OURS if implementation.name.startswith("triton") else "torch"


def emulated(implementation: registry.Implementation) -> str:
    key = implementation.operator, implementation.name
    if key in SERVED:
        return "served"
    if key in SERVED_ON_A_950:
        return "served on a 950"
    if source(implementation) == OURS:
        served = implementation.name == "triton" and implementation.operator in INTERPRETED
        return "served, interpreted" if served else "interpreter"
    return "no" if "situ_and_mul" in implementation.name else "alone"


CHECKED = {
    "torch": "torch operators alone",
    "torch_npu": "yes",
    "sgl_kernel_npu": "as documented",
    "CANN": "as documented",
    OURS: "its own",
}


def chosen() -> set[tuple[str, str]]:
    """(operator, name) of what this process chose on the NPU and runs. Where a choice is composed, its caller
    runs the parts instead, each chosen for itself (registry.choose_fused)."""
    return {
        (key[0], choice.name)
        for key, (choice, _) in registry._choices.items()
        if key[1] == DEVICE and not choice.composed
    }


def rows() -> list[tuple[str, ...]]:
    found = []
    for operator in registry.operators():
        for entry in registry.implementations(operator):
            if entry.device != DEVICE:
                continue
            note = NEVER_TAKEN.get(entry.name)
            checked = CHECKED[source(entry)] if emulated(entry) != "no" else "no"
            name = entry.name + (f" (refused: {note})" if note else "")
            found.append((f"`{operator}`", name, source(entry), checked, emulated(entry), "no"))
    return found


def text() -> str:
    head = "operator", "implementation", "source", "schema-checked", "emulated", "run on hardware"
    lines = [
        "# Operators on an Ascend NPU",
        "",
        "Written by `python -m tests.npu.table`; an operator's implementations stand in the order in which",
        "they are asked. Schema-checked: each call was run on the meta device against torch_npu's own",
        "schema, or, *as documented*, against the one that the package's sources declare, no such package",
        "being at hand; and a changed call was noticed (`tests/npu/cases_operators.py`). Emulated: *served*,",
        "the tiny model ran through it under SGLang's scheduler on the emulated NPU",
        "(`tests/npu/cases_serving.py`, `cases_vendor.py`); *alone*, compared with the oracle on its own;",
        "*interpreter*, compared with it in Triton's interpreter and compiled for both chips (kernels.md);",
        "*served, interpreted*, that and the tiny model ran through it there (`cases_triton.py`,",
        "`cases_triton_decode.py`), where `SGLANG_K3_KERNELS=triton` asks it first. Nothing was run on",
        "hardware.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
    ]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows()]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
