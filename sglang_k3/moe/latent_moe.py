"""Feed-forward sub-layers: the dense MLP, and the mixture of experts in a latent space."""

from __future__ import annotations

import torch
from sglang.srt.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from torch import nn

from sglang_k3.kernels.registry import choose
from sglang_k3.models.config import K3Config
from sglang_k3.models.layers import RMSNorm
from sglang_k3.models.runtime import add_ranks, kernel_call
from sglang_k3.moe.experts import Experts
from sglang_k3.moe.router import Router


class DenseMLP(nn.Module):
    """x [T, D] -> [T, D], gated by SiTU (K3) or SiLU. `add` False leaves the ranks' parts apart."""

    def __init__(self, config: K3Config, inner: int, quant_config, prefix: str) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner] * 2, bias=False, quant_config=quant_config, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            inner,
            hidden,
            bias=False,
            reduce_results=False,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
        )
        self.betas = (config.situ_beta, config.situ_linear_beta)
        self.act = choose("activation.gated", kernel_call())

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the output."""
        gate_up, _ = self.gate_up_proj(x)
        return self.down_proj(self.act(gate_up, *self.betas))[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return add_ranks(self.partial(x))


class LatentMoE(nn.Module):
    """x [T, D] -> [T, D]. Router and shared experts read x, routed experts its latent projection.

    The norm behind the routed sum is nonlinear, so the ranks are added before it.
    """

    def __init__(self, config: K3Config, quant_config, prefix: str) -> None:
        super().__init__()
        assert config.moe is not None
        moe, hidden = config.moe, config.hidden_size
        self.router = Router(config)
        self.experts = Experts(config)
        self.latent = moe.latent_size is not None
        self.normed = self.latent and moe.latent_norm
        if moe.latent_size is not None:
            self.latent_down = ReplicatedLinear(
                hidden, moe.latent_size, bias=False, quant_config=quant_config, prefix=f"{prefix}.latent_down"
            )
            self.latent_up = ReplicatedLinear(
                moe.latent_size, hidden, bias=False, quant_config=quant_config, prefix=f"{prefix}.latent_up"
            )
            if moe.latent_norm:
                self.latent_norm = RMSNorm(moe.latent_size, config.rms_norm_eps)
        self.shared_experts = (
            DenseMLP(config, moe.shared_intermediate_size, quant_config, f"{prefix}.shared_experts")
            if moe.num_shared_experts
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x)
        if not self.latent:
            routed = self.experts(x, ids, weights)
            if self.shared_experts is not None:
                routed = routed + self.shared_experts.partial(x)
            return add_ranks(routed)
        y = add_ranks(self.experts(self.latent_down(x)[0], ids, weights))
        if self.normed:
            y = self.latent_norm(y)
        out, _ = self.latent_up(y)
        return out if self.shared_experts is None else out + self.shared_experts(x)
