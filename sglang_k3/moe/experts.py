"""Routed experts of this rank, dense or packed MXFP4, stacked over the experts."""

from __future__ import annotations

import torch
from sglang.srt.distributed import divide
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import set_weight_attrs
from torch import nn

from sglang_k3.kernels.registry import choose
from sglang_k3.models.config import MXFP4_GROUP, K3Config
from sglang_k3.models.layers import weight
from sglang_k3.models.runtime import kernel_call
from sglang_k3.models.weights import load_experts


class Experts(nn.Module):
    """z [T, D], ids [T, k], weights [T, k] -> this rank's part of the sum, [T, D].

    Expert-parallel ranks own a range of experts, tensor-parallel ranks a range of every expert's inner
    rows; either way the parts of all ranks add up, and the caller adds them. Packed experts stay packed:
    w13_packed [E, 2I, D/2] and w2_packed [E, D, I/2] uint8, scales [.., /32] uint8 (E8M0).
    """

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        assert config.moe is not None
        moe, parallel = config.moe, get_parallel()
        count = divide(moe.num_experts, parallel.moe_ep_size)
        inner = divide(moe.intermediate_size, parallel.moe_tp_size)
        width = config.expert_size
        self.first = count * parallel.moe_ep_rank
        self.packed = moe.packed
        self.betas = (config.situ_beta, config.situ_linear_beta)
        shapes = {"w13": (count, 2 * inner, width), "w2": (count, width, inner)}
        loader = load_experts(self.first, count, parallel.moe_tp_rank, parallel.moe_tp_size)
        for name, (experts, rows, columns) in shapes.items():
            if moe.packed:
                if columns % MXFP4_GROUP:
                    raise ValueError(
                        f"--tp-size splits the experts' {name} into {columns} columns a rank, which is not a "
                        f"multiple of the MXFP4 group of {MXFP4_GROUP}: use fewer ranks, or --ep-size"
                    )
                parameters = {
                    f"{name}_packed": weight(experts, rows, columns // 2, dtype=torch.uint8),
                    f"{name}_scale": weight(experts, rows, columns // MXFP4_GROUP, dtype=torch.uint8),
                }
            else:
                parameters = {name: weight(experts, rows, columns)}
            for key, parameter in parameters.items():
                set_weight_attrs(parameter, {"weight_loader": loader})
                self.register_parameter(key, parameter)
        self.run = choose("moe.experts_mxfp4" if moe.packed else "moe.experts", kernel_call())

    def forward(self, z: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.packed:
            matrices = (self.w13_packed, self.w13_scale, self.w2_packed, self.w2_scale)
        else:
            matrices = (self.w13, self.w2)
        return self.run(z, ids, weights, *matrices, *self.betas, first_expert=self.first)
