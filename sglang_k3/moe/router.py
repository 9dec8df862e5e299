"""The router: sigmoid scores in fp32 over the full hidden size, a bias that only selects."""

from __future__ import annotations

import torch
from torch import nn

from sglang_k3.kernels.registry import choose
from sglang_k3.models.config import K3Config
from sglang_k3.models.layers import weight
from sglang_k3.models.runtime import kernel_call


class Router(nn.Module):
    """x [T, D] -> (weights [T, k] fp32, ids [T, k] int64, ascending)."""

    fp32_weight: torch.Tensor

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe = config.moe
        self.weight = weight(config.moe.num_experts, config.hidden_size)
        self.e_score_correction_bias = weight(config.moe.num_experts, dtype=torch.float32)
        call = kernel_call(torch.float32)
        self.linear = choose("linear", call)
        self.route = choose("moe.route", call)

    def prepare(self) -> None:
        """After loading: widen the weight once instead of in every step."""
        self.fp32_weight = self.weight.data.float()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        moe = self.moe
        return self.route(
            self.linear(x.float(), self.fp32_weight),
            self.e_score_correction_bias,
            moe.top_k,
            moe.renormalize,
            moe.routed_scaling_factor,
            moe.num_groups,
            moe.top_k_groups,
            moe.router_activation,
        )
