"""One Kimi Delta Attention layer: projections, short conv and recurrence (in the backend), gated norm."""

from __future__ import annotations

from functools import partial

import torch
from sglang.srt.distributed import divide
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import set_weight_attrs
from torch import nn

from sglang_k3.kernels.registry import choose
from sglang_k3.models.config import K3Config
from sglang_k3.models.layers import attention_column, attention_replicated, weight
from sglang_k3.models.runtime import add_ranks, kernel_call
from sglang_k3.models.weights import load_a_log, load_conv, load_sharded_vector


class KDAAttention(nn.Module):
    """x [T, D] -> [T, D]. Heads are sharded over the ranks; source: arXiv 2510.26692."""

    def __init__(self, config: K3Config, layer_id: int, quant_config, prefix: str) -> None:
        super().__init__()
        kda, hidden = config.kda, config.hidden_size
        parallel = get_parallel()
        heads = divide(kda.num_heads, parallel.attn_tp_size)
        rank, size = parallel.attn_tp_rank, parallel.attn_tp_size
        width = kda.projection_size
        self.eps = config.rms_norm_eps

        column = partial(attention_column, quant_config=quant_config, prefix=prefix)
        replicated = partial(attention_replicated, hidden, quant_config=quant_config, prefix=prefix)

        # q | k | v | b, and K3's output gate: one product instead of five, which is what a decode step feels.
        outputs = [width] * 3 + [kda.num_heads] + ([width] if kda.output_gate_rank is None else [])
        self.in_proj = MergedColumnParallelLinear(
            hidden,
            outputs,
            bias=False,
            quant_config=quant_config,
            parallel_group="attn_tp",
            prefix=f"{prefix}.in_proj",
        )
        self.parts = [3 * heads * kda.head_dim, heads, *[heads * kda.head_dim] * len(outputs[4:])]
        if kda.output_gate_rank is not None:
            self.g_a_proj = replicated("g_a_proj", kda.output_gate_rank)
            self.g_b_proj = column("g_b_proj", kda.output_gate_rank, width)
        self.low_rank_gate = kda.output_gate_rank is not None
        self.f_a_proj = replicated("f_a_proj", kda.head_dim)
        self.f_b_proj = column("f_b_proj", kda.head_dim, width)
        self.o_proj = RowParallelLinear(
            width,
            hidden,
            bias=False,
            reduce_results=False,
            quant_config=quant_config,
            parallel_group="attn_tp",
            prefix=f"{prefix}.o_proj",
        )

        channels = heads * kda.head_dim
        self.conv_weight = weight(3 * channels, kda.conv_kernel_size, dtype=torch.float32)
        self.A_log = weight(heads, dtype=torch.float32)
        self.dt_bias = weight(channels, dtype=torch.float32)
        self.o_norm_weight = weight(kda.head_dim, dtype=torch.float32)
        set_weight_attrs(self.conv_weight, {"weight_loader": load_conv(rank, size)})
        set_weight_attrs(self.A_log, {"weight_loader": load_a_log(kda.num_heads, rank, size)})
        set_weight_attrs(self.dt_bias, {"weight_loader": load_sharded_vector(rank, size)})

        self.gated_norm = choose("gated_rms_norm", kernel_call())
        self.attn = RadixLinearAttention(
            layer_id=layer_id,
            num_q_heads=heads,
            num_k_heads=heads,
            num_v_heads=heads,
            head_q_dim=kda.head_dim,
            head_k_dim=kda.head_dim,
            head_v_dim=kda.head_dim,
            conv_weights=self.conv_weight,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=kda.gate_lower_bound,
        )

    def prepare(self) -> None:
        """After loading: lay the taps out as the convolution reads them, [3 C, W] with channels adjacent."""
        self.conv_weight.data = self.conv_weight.data.t().contiguous().t()

    def forward(self, x: torch.Tensor, forward_batch) -> torch.Tensor:
        qkv, beta, *gates = self.in_proj(x)[0].split(self.parts, dim=-1)
        decay, _ = self.f_b_proj(self.f_a_proj(x)[0])
        gate = self.g_b_proj(self.g_a_proj(x)[0])[0] if self.low_rank_gate else gates[0]
        o = self.attn(forward_batch, mixed_qkv=qkv, a=decay, b=beta).squeeze(0)
        out, _ = self.o_proj(self.gated_norm(o, gate, self.o_norm_weight, self.eps))
        return add_ranks(out)
