"""MLA's output gate on an Ascend NPU, in torch operators."""

from __future__ import annotations

from sglang_k3.kernels.ascend import DEVICE
from sglang_k3.kernels.output_gate import reference
from sglang_k3.kernels.registry import register

register("output_gate", "npu torch", preference=10, device=DEVICE)(reference.output_gate)
