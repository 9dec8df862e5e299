"""Gated RMSNorm on an Ascend NPU, in torch operators."""

from __future__ import annotations

from sglang_k3.kernels.ascend import DEVICE
from sglang_k3.kernels.gated_rms_norm import reference
from sglang_k3.kernels.registry import register

register("gated_rms_norm", "npu torch", preference=10, device=DEVICE)(reference.gated_rms_norm)
