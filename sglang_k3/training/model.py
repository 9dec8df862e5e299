"""Kimi K3 in the form it is trained in: batched, differentiable, fp32, without caches.

Module and parameter names are the checkpoint's, so exporting is renaming (`checkpoint.py`). Everything
is plain torch; the delta rule runs in chunks of 16 tokens as batched products.

B rows, T tokens, D hidden size, H heads, K key width (= value width), C rows of a chunk, N chunks.

Sources: Kimi Linear (arXiv 2510.26692) for KDA and MLA without positions, attention residuals
(arXiv 2603.15031), balancing without an auxiliary loss (arXiv 2408.15664), OCP MX for MXFP4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_k3.kernels.mx.reference import dequantize_mxfp4, quantize_mxfp4
from sglang_k3.models.config import ConfigError, K3Config

Bank = list[tuple[Tensor, Tensor]]
"""Finished residual blocks [B, T, D], each with its inverse RMS [B, T]."""

CHUNK = 16
"""Tokens of a chunk. Log decays are above -5, so a chunk's exponents stay within 80 and e^80 fits fp32."""

_L2_EPS = 1e-6
_NORMALISER_EPS = 1e-20


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Kimi Delta Attention from an empty state, in chunks.

    With G the running sum of log decays inside a chunk and S0 the state [K, V] in front of it:

        M_ij = beta_i <k_i e^{G_i}, k_j e^{-G_j}>  (i > j)      (I + M) [W | U] = beta [k e^G | v]
        u = U - W S0        o = (q e^G) S0 + A u,  A_ij = <q_i e^{G_i}, k_j e^{-G_j}>  (i >= j)
        S = e^{G_C} S0 + (k e^{G_C - G})^T u

    Args:
        q, k: [B, H, T, K] of unit length; q already scaled. v: [B, H, T, K].
        g: [B, H, T, K] log decays, in (-5, 0]. beta: [B, H, T].

    Returns:
        o [B, H, T, K].
    """
    tokens = q.shape[2]
    missing = -tokens % CHUNK
    if missing:
        # Rows of zeros behind the end: no decay, no step, outputs cut off below.
        q, k, v, g = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, v, g))
        beta = F.pad(beta, (0, missing))
    q, k, v, g = (x.unflatten(2, (-1, CHUNK)).flatten(0, 1) for x in (q, k, v, g))  # [BH, N, C, K]
    step = beta.unflatten(2, (-1, CHUNK)).flatten(0, 1).unsqueeze(-1)

    total = g.cumsum(2)
    shrunk = total.exp()
    k_in, k_out = k * shrunk, k * (-total).exp()
    q_in = q * shrunk
    system = (step * (k_in @ k_out.mT)).tril(-1)
    solved = torch.linalg.solve_triangular(
        system, step * torch.cat([k_in, v], dim=-1), upper=False, unitriangular=True
    )
    w, u = solved.split((k.shape[-1], v.shape[-1]), dim=-1)
    last = total[:, :, -1:]
    k_end = (k * (last - total).exp()).mT
    kept = last.exp().mT  # [BH, N, K, 1]

    state = q.new_zeros(q.shape[0], q.shape[-1], v.shape[-1])
    states, writes = [], []
    for u_n, w_n, kept_n, k_n in zip(u.unbind(1), w.unbind(1), kept.unbind(1), k_end.unbind(1), strict=True):
        states.append(state)
        write = torch.baddbmm(u_n, w_n, state, alpha=-1)
        writes.append(write)
        state = torch.baddbmm(kept_n * state, k_n, write)
    within = (q_in @ k_out.mT).tril()
    o = q_in @ torch.stack(states, 1) + within @ torch.stack(writes, 1)
    return o.flatten(1, 2).unflatten(0, (beta.shape[0], -1))[:, :, :tokens]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class CausalConvolution(torch.autograd.Function):
    """Depthwise: x [B, T, C], taps [W, C], the last for the current token -> [B, T, C].

    Written out because autograd's gradient of a slice is a padded copy of the whole tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, taps)
        y = x * taps[-1]
        for back in range(1, min(len(taps), x.shape[1])):
            y[:, back:].addcmul_(x[:, :-back], taps[-1 - back])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, taps = ctx.saved_tensors
        (dy,) = grads
        dx, dtaps = dy * taps[-1], torch.zeros_like(taps)
        dtaps[-1] = (dy * x).sum((0, 1))
        for back in range(1, min(len(taps), x.shape[1])):
            dx[:, :-back].addcmul_(dy[:, back:], taps[-1 - back])
            dtaps[-1 - back] = (dy[:, back:] * x[:, :-back]).sum((0, 1))
        return dx, dtaps


class Taps(nn.Module):
    """Weights of a short convolution, [C, 1, W]."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))


class KimiDeltaAttention(nn.Module):
    """KDA with the bounded decay and a full-rank output gate."""

    def __init__(self, config: K3Config):
        super().__init__()
        kda, hidden = config.kda, config.hidden_size
        if kda.gate_lower_bound is None or kda.output_gate_rank is not None:
            raise ConfigError("the training form knows bounded decays and full-rank output gates only")
        if kda.gate_lower_bound < -5:
            raise ConfigError(f"gate_lower_bound={kda.gate_lower_bound}: chunks of {CHUNK} overflow below -5")
        self.kda, self.lower_bound = kda, kda.gate_lower_bound
        width = kda.projection_size
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (_linear(hidden, width) for _ in range(4))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (Taps(width, kda.conv_kernel_size) for _ in range(3))
        self.b_proj = _linear(hidden, kda.num_heads)
        self.f_a_proj = _linear(hidden, kda.head_dim)
        self.f_b_proj = _linear(kda.head_dim, width)
        self.A_log = nn.Parameter(torch.empty(kda.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.o_norm = RMSNorm(kda.head_dim, config.rms_norm_eps)
        self.o_proj = _linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        width, kda = self.kda.projection_size, self.kda
        weights = [
            layer.weight
            for layer in (self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.f_a_proj, self.b_proj)
        ]
        sizes = (3 * width, width, kda.head_dim, kda.num_heads)
        qkv, gate, f, b = F.linear(x, torch.cat(weights)).split(sizes, dim=-1)
        taps = torch.cat([conv.weight[:, 0] for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
        qkv = F.silu(CausalConvolution.apply(qkv, taps.T))
        q, k, v = (self._heads(part) for part in qkv.chunk(3, dim=-1))
        f = self._heads(self.f_b_proj(f) + self.dt_bias)
        g = self.lower_bound * torch.sigmoid(self.A_log.exp()[:, None, None] * f)
        beta = torch.sigmoid(b).mT
        o = delta_rule(_unit(q) * self.kda.head_dim**-0.5, _unit(k), v, g, beta)
        o = self.o_norm(o).transpose(1, 2).flatten(2)
        return self.o_proj(o * torch.sigmoid(gate))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, H * K] -> [B, H, T, K]."""
        return x.unflatten(-1, (self.kda.num_heads, self.kda.head_dim)).transpose(1, 2)


class GatedLatentAttention(nn.Module):
    """MLA without positions: the shared "rope" part of the keys enters the score as it is."""

    def __init__(self, config: K3Config):
        super().__init__()
        mla, hidden = config.mla, config.hidden_size
        if mla.q_lora_rank is None or not mla.output_gate:
            raise ConfigError("the training form needs q_lora_rank and mla_use_output_gate")
        self.mla = mla
        self.q_a_proj = _linear(hidden, mla.q_lora_rank)
        self.q_a_layernorm = RMSNorm(mla.q_lora_rank, mla.q_norm_eps)
        self.q_b_proj = _linear(mla.q_lora_rank, mla.num_heads * mla.qk_head_dim)
        self.kv_a_proj_with_mqa = _linear(hidden, mla.kv_lora_rank + mla.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, mla.kv_norm_eps)
        self.kv_b_proj = _linear(mla.kv_lora_rank, mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim))
        self.g_proj = _linear(hidden, mla.num_heads * mla.v_head_dim)
        self.o_proj = _linear(mla.num_heads * mla.v_head_dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        mla = self.mla
        weights = [layer.weight for layer in (self.q_a_proj, self.kv_a_proj_with_mqa, self.g_proj)]
        sizes = (len(weights[0]), mla.kv_lora_rank, mla.qk_rope_head_dim, len(weights[2]))
        q, latent, shared, gate = F.linear(x, torch.cat(weights)).split(sizes, dim=-1)
        q = self._heads(self.q_b_proj(self.q_a_layernorm(q)))
        keys_values = self._heads(self.kv_b_proj(self.kv_a_layernorm(latent)))
        k, v = keys_values.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, mla.num_heads, -1, -1)], dim=-1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=mla.scale)
        return self.o_proj(o.transpose(1, 2).flatten(2) * torch.sigmoid(gate))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.mla.num_heads, -1)).transpose(1, 2)


class MLP(nn.Module):
    """Dense MLP or shared expert with SiTU."""

    def __init__(self, config: K3Config, width: int):
        super().__init__()
        self.betas = _betas(config)
        self.gate_proj = _linear(config.hidden_size, width)
        self.up_proj = _linear(config.hidden_size, width)
        self.down_proj = _linear(width, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight])).chunk(2, dim=-1)
        return self.down_proj(situ(gate, up, *self.betas))


class Router(nn.Module):
    """Sigmoid router: the bias takes part in the choice of experts and not in their weights."""

    e_score_correction_bias: Tensor
    load: Tensor
    """[E]: how many tokens chose each expert since `rebalance`."""

    def __init__(self, experts: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """[T, D] -> weights [T, k] that add up to 1, experts [T, k]."""
        scores = torch.sigmoid(F.linear(x, self.weight))
        chosen = (scores.detach() + self.e_score_correction_bias).topk(top_k, dim=-1, sorted=False).indices
        self.load += torch.bincount(chosen.flatten(), minlength=len(self.load))
        weights = scores.gather(1, chosen)
        return weights / (weights.sum(-1, keepdim=True) + _NORMALISER_EPS), chosen

    @torch.no_grad()
    def rebalance(self, rate: float) -> float:
        """Move each bias by `rate` against its expert's load; the heaviest load over the mean."""
        mean = self.load.mean()
        self.e_score_correction_bias += rate * torch.sign(mean - self.load)
        heaviest = (self.load.max() / mean).item()
        self.load.zero_()
        return heaviest


class Experts(nn.Module):
    """Routed experts in the latent space. w1 gate and w3 up [E, I, L], w2 down [E, L, I]."""

    def __init__(self, config: K3Config, count: int, inner: int):
        super().__init__()
        outer = config.expert_size
        self.betas = _betas(config)
        self.w1 = nn.Parameter(torch.empty(count, inner, outer))
        self.w3 = nn.Parameter(torch.empty(count, inner, outer))
        self.w2 = nn.Parameter(torch.empty(count, outer, inner))
        self.quantised = False
        """Whether the forward sees the weights rounded to MXFP4 (gradients pass straight through)."""

    def forward(self, z: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """z [T, L], weights and chosen [T, k] -> [T, L]."""
        w1, w3, w2 = ((_rounded(w) if self.quantised else w) for w in (self.w1, self.w3, self.w2))
        w13, w2 = torch.cat([w1, w3], dim=1).mT.unbind(0), w2.mT.unbind(0)
        count, top_k = len(w2), chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        sizes = torch.bincount(chosen.flatten(), minlength=count).tolist()
        outputs = []
        for e, rows in enumerate(z[order // top_k].split(sizes)):
            gate, up = (rows @ w13[e]).chunk(2, dim=-1)
            outputs.append(situ(gate, up, *self.betas) @ w2[e])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        by_token = torch.cat(outputs)[back].unflatten(0, (-1, top_k))
        return (weights.unsqueeze(1) @ by_token).squeeze(1)


class LatentMoE(nn.Module):
    """Routed experts between a down and an up projection, plus the shared expert."""

    def __init__(self, config: K3Config):
        super().__init__()
        moe, hidden = config.moe, config.hidden_size
        if moe is None or moe.latent_size is None or not moe.latent_norm or not moe.num_shared_experts:
            raise ConfigError("the training form needs a latent MoE with norm and shared experts")
        if moe.router_activation != "sigmoid" or not moe.renormalize or moe.num_groups != 1:
            raise ConfigError("the training form needs a sigmoid router, renormalised, without groups")
        if moe.routed_scaling_factor != 1.0:
            raise ConfigError(f"routed_scaling_factor={moe.routed_scaling_factor}: use 1.0")
        self.top_k = moe.top_k
        self.gate = Router(moe.num_experts, hidden)
        self.routed_expert_down_proj = _linear(hidden, moe.latent_size)
        self.experts = Experts(config, moe.num_experts, moe.intermediate_size)
        self.routed_expert_norm = RMSNorm(moe.latent_size, config.rms_norm_eps)
        self.routed_expert_up_proj = _linear(moe.latent_size, hidden)
        self.shared_experts = MLP(config, moe.shared_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        rows = x.flatten(0, 1)
        weights, chosen = self.gate(rows, self.top_k)
        y = self.experts(self.routed_expert_down_proj(rows), weights, chosen)
        y = self.routed_expert_up_proj(self.routed_expert_norm(y))
        return y.view_as(x) + self.shared_experts(x)


class Query(nn.Module):
    """The learned query of a residual mix, stored as a projection to one channel."""

    def __init__(self, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden))


class Layer(nn.Module):
    """Attention and MLP, each behind a mix over the finished blocks and the running one."""

    def __init__(self, config: K3Config, index: int):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.starts_block = config.starts_block(index)
        self.self_attention_res_norm = RMSNorm(hidden, eps)
        self.self_attention_res_proj = Query(hidden)
        self.mlp_res_norm = RMSNorm(hidden, eps)
        self.mlp_res_proj = Query(hidden)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn = KimiDeltaAttention(config) if config.is_kda(index) else GatedLatentAttention(config)
        self.mlp = LatentMoE(config) if config.is_moe(index) else MLP(config, config.intermediate_size)

    def forward(self, stream: Tensor, bank: Bank) -> tuple[Tensor, Bank]:
        """The block's running sum [B, T, D] and the bank, both behind this layer."""
        h = mix(stream, bank, self.self_attention_res_norm, self.self_attention_res_proj)
        attention = self.self_attn(self.input_layernorm(h))
        if self.starts_block:
            bank, stream = [*bank, (stream, _inverse_rms(stream, self.input_layernorm.eps))], attention
        else:
            stream = stream + attention
        h = mix(stream, bank, self.mlp_res_norm, self.mlp_res_proj)
        return stream + self.mlp(self.post_attention_layernorm(h)), bank


class Trunk(nn.Module):
    """What a checkpoint puts under "model."."""

    def __init__(self, config: K3Config):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if config.residual_block_size is None:
            raise ConfigError("the training form needs attn_res_block_size")
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.output_attn_res_norm = RMSNorm(hidden, eps)
        self.output_attn_res_proj = Query(hidden)
        self.norm = RMSNorm(hidden, eps)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.embed_tokens(tokens)
        bank: Bank = []
        for layer in self.layers:
            stream, bank = layer(stream, bank)
        return self.norm(mix(stream, bank, self.output_attn_res_norm, self.output_attn_res_proj))


class TrainingModel(nn.Module):
    """The whole text model. Raises ConfigError for a config that isn't K3's kind."""

    def __init__(self, config: K3Config, seed: int = 0):
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = _linear(config.hidden_size, config.vocab_size)
        _initialise(self, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> what lm_head reads [B, T, D]; every row starts from an empty state."""
        return self.model(tokens)

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> [B, T, vocabulary]."""
        return self.lm_head(self(tokens))

    @property
    def routers(self) -> list[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]

    def round_experts(self, enabled: bool) -> None:
        """Let forwards see the routed experts as MXFP4 will store them."""
        for module in self.modules():
            if isinstance(module, Experts):
                module.quantised = enabled


def mix(stream: Tensor, bank: Bank, norm: RMSNorm, query: Query) -> Tensor:
    """Softmax attention of one learned query over the bank and the stream, [B, T, D] each.

    Keys are the normed candidates, values the candidates themselves. An empty bank gives the stream.
    """
    if not bank:
        return stream
    key_weight = norm.weight * query.weight[0]
    candidates = [*bank, (stream, _inverse_rms(stream, norm.eps))]
    scores = torch.stack([(value @ key_weight) * inverse for value, inverse in candidates], dim=-1)
    weights = torch.softmax(scores, dim=-1).unsqueeze(-1).unbind(-2)
    mixed = weights[0] * candidates[0][0]
    for weight, (value, _) in zip(weights[1:], candidates[1:], strict=True):
        mixed = torch.addcmul(mixed, weight, value)
    return mixed


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """Gated activation with both branches bounded by tanh; the sigmoid takes the raw gate."""
    bounded = torch.tanh(gate / beta) * torch.sigmoid(gate)
    return (beta * linear_beta) * bounded * torch.tanh(up / linear_beta)


def _rounded(stack: Tensor) -> Tensor:
    """[E, R, C] as MXFP4 stores it; the gradient passes as if nothing had happened."""
    packed, scale = quantize_mxfp4(stack.detach().flatten(0, 1))
    exact = dequantize_mxfp4(packed, scale, stack.dtype).view_as(stack)
    return stack + (exact - stack).detach()


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1) + eps)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _betas(config: K3Config) -> tuple[float, float]:
    if config.situ_beta is None or config.situ_linear_beta is None:
        raise ConfigError("the training form needs hidden_act 'situ'")
    return config.situ_beta, config.situ_linear_beta


_OUTPUT_PROJECTIONS = ("o_proj.weight", "down_proj.weight", "routed_expert_up_proj.weight")


@torch.no_grad()
def _initialise(model: TrainingModel, seed: int) -> None:
    """Projections keep the RMS of what they read; what joins the stream starts smaller."""
    generator = torch.Generator().manual_seed(seed)
    small = 0.5 / math.sqrt(model.config.num_layers)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.zero_()
        elif name.endswith("dt_bias"):
            # Log decays of -0.003 to -1.7 a token before the token has its say: long and short memory.
            parameter.uniform_(-7.5, -0.7, generator=generator)
        elif "conv1d" in name:
            parameter.normal_(0.0, 0.3, generator=generator)
            parameter[..., -1] += 0.7
        elif name.endswith("embed_tokens.weight"):
            parameter.normal_(0.0, 0.1, generator=generator)
        elif name.endswith("lm_head.weight"):
            parameter.normal_(0.0, 0.3 / math.sqrt(parameter.shape[-1]), generator=generator)
        elif parameter.dim() >= 2 and not name.endswith("res_proj.weight"):
            joins_stream = name.endswith(_OUTPUT_PROJECTIONS) and "routed_expert_down" not in name
            gain = small if joins_stream else 1.0
            parameter.normal_(0.0, gain / math.sqrt(parameter.shape[-1]), generator=generator)
