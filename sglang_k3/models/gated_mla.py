"""One multi-head latent attention layer in the absorbed form, with K3's output gate."""

from __future__ import annotations

from functools import partial

import torch
from sglang.srt.distributed import divide
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_k3.kernels.registry import choose
from sglang_k3.models.config import K3Config
from sglang_k3.models.layers import RMSNorm, attention_column, attention_replicated
from sglang_k3.models.runtime import add_ranks, kernel_call


class GatedMLA(nn.Module):
    """x [T, D] -> [T, D]; nothing is rotated. The cache row of a token is [normed latent | rope part].

    Absorbed: a query reads the latent cache as it is stored, through q~ = UK_h^T q_nope, and the values
    come back through UV_h. kv_b_proj is kept only for loading; `prepare` splits it.
    """

    w_uk: torch.Tensor
    w_uv: torch.Tensor

    def __init__(self, config: K3Config, layer_id: int, quant_config, prefix: str) -> None:
        super().__init__()
        mla, hidden = config.mla, config.hidden_size
        self.mla = mla
        self.heads = divide(mla.num_heads, get_parallel().attn_tp_size)

        column = partial(attention_column, quant_config=quant_config, prefix=prefix)
        replicated = partial(attention_replicated, hidden, quant_config=quant_config, prefix=prefix)

        queries = mla.num_heads * mla.qk_head_dim
        if mla.q_lora_rank is None:
            self.q_proj = column("q_proj", hidden, queries)
        else:
            self.q_a_proj = replicated("q_a_proj", mla.q_lora_rank)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, mla.q_norm_eps)
            self.q_b_proj = column("q_b_proj", mla.q_lora_rank, queries)
        self.kv_a_proj_with_mqa = replicated("kv_a_proj_with_mqa", mla.cache_width)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, mla.kv_norm_eps)
        self.kv_b_proj = column(
            "kv_b_proj", mla.kv_lora_rank, mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        )
        if mla.output_gate:
            self.gate_proj = column("gate_proj", hidden, mla.num_heads * mla.v_head_dim)
            self.gate = choose("output_gate", kernel_call())
        self.o_proj = RowParallelLinear(
            mla.num_heads * mla.v_head_dim,
            hidden,
            bias=False,
            reduce_results=False,
            quant_config=quant_config,
            parallel_group="attn_tp",
            prefix=f"{prefix}.o_proj",
        )
        self.batched = choose("linear_batched", kernel_call())
        self.attn = RadixAttention(
            self.heads,
            mla.cache_width,
            mla.scale,
            num_kv_heads=1,
            layer_id=layer_id,
            v_head_dim=mla.kv_lora_rank,
            prefix=f"{prefix}.attn",
        )

    def prepare(self) -> None:
        """After loading: w_uk [H, latent, nope] and w_uv [H, v, latent] from kv_b_proj's rows."""
        mla = self.mla
        weight: torch.Tensor = self.kv_b_proj.weight.data  # type: ignore[assignment]
        per_head = weight.view(self.heads, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank)
        self.w_uk = per_head[:, : mla.qk_nope_head_dim].transpose(1, 2).contiguous()
        self.w_uv = per_head[:, mla.qk_nope_head_dim :].contiguous()

    def forward(self, x: torch.Tensor, forward_batch) -> torch.Tensor:
        mla = self.mla
        if mla.q_lora_rank is None:
            q, _ = self.q_proj(x)
        else:
            q, _ = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)[0]))
        q_nope, q_rope = q.view(-1, self.heads, mla.qk_head_dim).split(
            [mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1
        )
        kv, _ = self.kv_a_proj_with_mqa(x)
        latent = self.kv_a_layernorm(kv[:, : mla.kv_lora_rank])
        row = torch.cat([latent, kv[:, mla.kv_lora_rank :]], dim=-1)
        absorbed = torch.cat([self.batched(q_nope, self.w_uk), q_rope], dim=-1)
        mixed = self.attn(absorbed.flatten(1), row, latent, forward_batch)
        o = self.batched(mixed.view(-1, self.heads, mla.kv_lora_rank), self.w_uv).flatten(1)
        if mla.output_gate:
            o = self.gate(o, self.gate_proj(x)[0])
        out, _ = self.o_proj(o)
        return add_ranks(out)
