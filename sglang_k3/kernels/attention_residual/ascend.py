"""Attention-residual mixes on an Ascend NPU, in torch operators (both phases are whole-tensor already)."""

from __future__ import annotations

from sglang_k3.kernels.ascend import DEVICE
from sglang_k3.kernels.attention_residual import reference
from sglang_k3.kernels.registry import register

register("attention_residual.mix", "npu torch", preference=10, device=DEVICE)(reference.mix)
register("attention_residual.block_prepare", "npu torch", preference=10, device=DEVICE)(
    reference.block_prepare
)
register("attention_residual.merge_partial", "npu torch", preference=10, device=DEVICE)(
    reference.merge_partial
)
register("attention_residual.mix_norm", "npu torch", preference=10, device=DEVICE, composed=True)(
    reference.mix_norm
)
register("attention_residual.merge_norm", "npu torch", preference=10, device=DEVICE, composed=True)(
    reference.merge_norm
)
