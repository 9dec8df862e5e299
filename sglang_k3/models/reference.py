"""The whole text model in plain torch, written to be read beside the papers.

It is the oracle of every other implementation: no kernels, no pools, no batching, one sequence at a
time in fp64 or fp32. The delta rule runs token by token; projections run over all tokens at once.

Sources: Kimi Linear (arXiv 2510.26692) for KDA and MLA without positions, attention residuals
(arXiv 2603.15031), OCP Microscaling formats for MXFP4.

    model = ReferenceModel.from_checkpoint("some/directory")
    logits = model.forward([72, 101, 108])          # [3, vocabulary]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_k3.models.config import MXFP4_GROUP, K3Config
from sglang_k3.models.names import canonical, is_vision

_L2_EPS = 1e-6
_NORMALISER_EPS = 1e-20


@dataclass
class LayerState:
    """What one layer remembers between calls. KDA: window and memory; MLA: latents."""

    window: Tensor
    """[W - 1, 3 * H * K]: the last rows of q | k | v in front of the convolution."""
    memory: Tensor
    """[H, K, V]: S of the delta rule."""
    latents: Tensor
    """[tokens, L + R]: normed latent and shared key part of each token so far."""


@dataclass
class Trace:
    """What a forward saw on its way, by layer. T is the number of tokens of that call."""

    mixtures: list[Tensor] = field(default_factory=list)
    """[T, D]: what each layer's attention reads, in front of its norm."""
    sums: list[Tensor] = field(default_factory=list)
    """[T, D]: the residual stream (for K3, the block's partial sum) behind each layer."""
    experts: dict[int, Tensor] = field(default_factory=dict)
    """[T, k] int64, ascending: the experts chosen, for MoE layers."""
    expert_gaps: dict[int, Tensor] = field(default_factory=dict)
    """[T]: how far the last expert chosen scored above the first left out."""


class ReferenceModel:
    """A model made of checkpoint tensors under their checkpoint names.

    dtype: of all arithmetic and of the results, torch.float64 or torch.float32.
    """

    def __init__(self, config: K3Config, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float64):
        self.config = config
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            stem, _, part = canonical(name).rpartition(".")
            if is_vision(name) or part == "weight_scale":
                continue
            if part == "weight_packed":
                scale = tensors[name.removesuffix("packed") + "scale"]
                self.tensors[f"{stem}.weight"] = unpack_mxfp4(tensor, scale, dtype)
            else:
                self.tensors[canonical(name)] = tensor.to(dtype)

    @classmethod
    def from_checkpoint(cls, directory: str | Path, dtype: torch.dtype = torch.float64) -> ReferenceModel:
        """Read config.json and every *.safetensors file of a directory."""
        path = Path(directory)
        tensors: dict[str, Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            tensors |= load_file(file)
        return cls(K3Config.from_hf(json.loads((path / "config.json").read_text())), tensors, dtype)

    def new_state(self) -> list[LayerState]:
        """The state of a sequence of no tokens, one entry a layer."""
        kda, mla = self.config.kda, self.config.mla

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self.dtype)

        return [
            LayerState(
                window=zeros(kda.conv_kernel_size - 1, 3 * kda.projection_size),
                memory=zeros(kda.num_heads, kda.head_dim, kda.head_dim),
                latents=zeros(0, mla.kv_lora_rank + mla.qk_rope_head_dim),
            )
            for _ in range(self.config.num_layers)
        ]

    @torch.no_grad()
    def forward(
        self,
        tokens: Sequence[int] | Tensor,
        state: list[LayerState] | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """Logits [T, vocabulary] of T tokens that follow on the state, which moves on in place."""
        with _one_thread():
            return self._forward(
                torch.as_tensor(tokens, dtype=torch.int64),
                self.new_state() if state is None else state,
                Trace() if trace is None else trace,
            )

    def step(self, token: int, state: list[LayerState], trace: Trace | None = None) -> Tensor:
        """Logits [vocabulary] behind one more token."""
        return self.forward([token], state, trace)[0]

    def _forward(self, tokens: Tensor, state: list[LayerState], trace: Trace) -> Tensor:
        stream = self.tensors["model.embed_tokens.weight"][tokens]
        bank: list[Tensor] = []
        for layer in range(self.config.num_layers):
            at = f"model.layers.{layer}."
            h = self._mix(stream, bank, f"{at}self_attention_res")
            trace.mixtures.append(h)
            if self.config.starts_block(layer):
                bank.append(stream)
                stream = torch.zeros_like(stream)
            attend = self._kda if self.config.is_kda(layer) else self._mla
            stream = stream + attend(self._norm(h, f"{at}input_layernorm"), f"{at}self_attn.", state[layer])
            h = self._mix(stream, bank, f"{at}mlp_res")
            x = self._norm(h, f"{at}post_attention_layernorm")
            if self.config.is_moe(layer):
                stream = stream + self._moe(x, f"{at}mlp.", layer, trace)
            else:
                stream = stream + self._mlp(x, f"{at}mlp.")
            trace.sums.append(stream)
        h = self._mix(stream, bank, "model.output_attn_res")
        return self._linear(self._norm(h, "model.norm"), "lm_head")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        eps = self.config.rms_norm_eps if eps is None else eps
        return _normalised(x, eps) * self.tensors[f"{name}.weight"]

    def _mix(self, stream: Tensor, bank: list[Tensor], name: str) -> Tensor:
        """Attention over the finished blocks and the running one, by one learned query.

        Keys are the normed candidates, values the candidates as they are. With an empty bank (and
        so always in a model without residual blocks) the stream itself.
        """
        if not bank:
            return stream
        candidates = torch.stack([*bank, stream])
        keys = self._norm(candidates, f"{name}_norm")
        query = self.tensors[f"{name}_proj.weight"][0]
        weights = torch.softmax(keys @ query, dim=0)
        return (weights[:, :, None] * candidates).sum(dim=0)

    def _kda(self, x: Tensor, at: str, state: LayerState) -> Tensor:
        """Kimi Delta Attention; x [T, D] -> [T, D]."""
        kda = self.config.kda
        per_head = (len(x), kda.num_heads, kda.head_dim)
        qkv = torch.cat([self._linear(x, f"{at}{name}_proj") for name in "qkv"], dim=-1)
        taps = torch.cat([self.tensors[f"{at}{name}_conv1d.weight"][:, 0] for name in "qkv"])
        history = torch.cat([state.window, qkv])
        convolved = sum(history[j : j + len(x)] * taps[:, j] for j in range(kda.conv_kernel_size))
        assert isinstance(convolved, Tensor)
        state.window = history[len(x) :]
        q, k, v = (part.view(per_head) for part in _silu(convolved).chunk(3, dim=-1))
        q = _unit(q) * kda.head_dim**-0.5
        k = _unit(k)

        f = self._linear(self._linear(x, f"{at}f_a_proj"), f"{at}f_b_proj") + self.tensors[f"{at}dt_bias"]
        rate = self.tensors[f"{at}A_log"].flatten()[: kda.num_heads, None].exp()
        if kda.gate_lower_bound is None:
            decay = -rate * torch.logaddexp(f, torch.zeros_like(f)).view(per_head)
        else:
            decay = kda.gate_lower_bound * torch.sigmoid(rate * f.view(per_head))
        beta = torch.sigmoid(self._linear(x, f"{at}b_proj"))

        retained = decay.exp()
        outputs = []
        s = state.memory
        for t in range(len(x)):
            s = s * retained[t, :, :, None]
            u = beta[t, :, None] * (v[t] - _rows_times(k[t], s))
            s = s + k[t, :, :, None] * u[:, None, :]
            outputs.append(_rows_times(q[t], s))
        state.memory = s

        if kda.output_gate_rank is None:
            gate = self._linear(x, f"{at}g_proj")
        else:
            gate = self._linear(self._linear(x, f"{at}g_a_proj"), f"{at}g_b_proj")
        o = self._norm(torch.stack(outputs), f"{at}o_norm").flatten(1)
        return self._linear(o * torch.sigmoid(gate), f"{at}o_proj")

    def _mla(self, x: Tensor, at: str, state: LayerState) -> Tensor:
        """Multi-head latent attention without positions; x [T, D] -> [T, D]."""
        mla = self.config.mla
        if mla.q_lora_rank is None:
            q = self._linear(x, f"{at}q_proj")
        else:
            latent = self._norm(self._linear(x, f"{at}q_a_proj"), f"{at}q_a_layernorm", mla.q_norm_eps)
            q = self._linear(latent, f"{at}q_b_proj")
        q = q.unflatten(-1, (mla.num_heads, mla.qk_head_dim))

        split = (mla.kv_lora_rank, mla.qk_rope_head_dim)
        latent, shared = self._linear(x, f"{at}kv_a_proj_with_mqa").split(split, dim=-1)
        latent = self._norm(latent, f"{at}kv_a_layernorm", mla.kv_norm_eps)
        state.latents = torch.cat([state.latents, torch.cat([latent, shared], dim=-1)])
        latent, shared = state.latents.split(split, dim=-1)
        keys_values = self._linear(latent, f"{at}kv_b_proj").unflatten(-1, (mla.num_heads, -1))
        k_own, v = keys_values.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        k = torch.cat([k_own, shared[:, None].expand(-1, mla.num_heads, -1)], dim=-1)

        scores = torch.einsum("thd,shd->hts", q, k) * mla.scale
        total, new = len(k), len(x)
        later = torch.ones(new, total, dtype=torch.bool).triu(total - new + 1)
        weights = torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1)
        o = torch.einsum("hts,shd->thd", weights, v).flatten(1)
        if mla.output_gate:
            o = o * torch.sigmoid(self._linear(x, f"{at}g_proj"))
        return self._linear(o, f"{at}o_proj")

    def _mlp(self, x: Tensor, at: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")):
        """down(act(gate(x)) * up(x)), with SiTU's bounded branches where the config has them."""
        gate, up, down = (f"{at}{name}" for name in names)
        g, u = self._linear(x, gate), self._linear(x, up)
        beta, linear_beta = self.config.situ_beta, self.config.situ_linear_beta
        if beta is None or linear_beta is None:
            return self._linear(_silu(g) * u, down)
        bounded_gate = beta * torch.tanh(g / beta) * torch.sigmoid(g)
        return self._linear(bounded_gate * linear_beta * torch.tanh(u / linear_beta), down)

    def _moe(self, x: Tensor, at: str, layer: int, trace: Trace) -> Tensor:
        """Routed experts, in the latent space where there is one, plus the shared experts."""
        moe = self.config.moe
        assert moe is not None
        weights, chosen, gap = self._route(x, at)
        trace.experts[layer], trace.expert_gaps[layer] = chosen, gap
        z = x if moe.latent_size is None else self._linear(x, f"{at}routed_expert_down_proj")
        y = torch.zeros_like(z)
        for expert in chosen.unique().tolist():
            rows, place = torch.where(chosen == expert)
            out = self._mlp(z[rows], f"{at}experts.{expert}.", ("w1", "w3", "w2"))
            y[rows] += weights[rows, place, None] * out
        if moe.latent_size is not None:
            # The norm comes behind the whole sum over the experts.
            y = self._norm(y, f"{at}routed_expert_norm") if moe.latent_norm else y
            y = self._linear(y, f"{at}routed_expert_up_proj")
        if moe.num_shared_experts:
            y = y + self._mlp(x, f"{at}shared_experts.")
        return y

    def _route(self, x: Tensor, at: str) -> tuple[Tensor, Tensor, Tensor]:
        """Weights [T, k], experts [T, k] (ascending) and the margin [T] of the choice."""
        moe = self.config.moe
        assert moe is not None
        logits = self._linear(x, f"{at}gate")
        scores = torch.softmax(logits, -1) if moe.router_activation == "softmax" else torch.sigmoid(logits)
        ranking = scores + self.tensors[f"{at}gate.e_score_correction_bias"]
        gaps = []
        if moe.num_groups > 1:
            groups = ranking.unflatten(-1, (moe.num_groups, -1))
            best, gap = _best(groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1), moe.top_k_groups)
            closed = torch.ones(len(x), moe.num_groups, dtype=torch.bool).scatter(1, best, False)
            ranking = groups.masked_fill(closed[:, :, None], float("-inf")).flatten(1)
            gaps.append(gap)
        chosen, gap = _best(ranking, moe.top_k)
        weights = scores.gather(1, chosen)
        if moe.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + _NORMALISER_EPS)
        return weights * moe.routed_scaling_factor, chosen, torch.stack([*gaps, gap]).amin(0)


def top2_gap(logits: Tensor) -> Tensor:
    """How far the best logit of each row lies above the second; [T, vocabulary] -> [T]."""
    best = logits.topk(2, dim=-1).values
    return best[..., 0] - best[..., 1]


def unpack_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of MXFP4 codes: packed [rows, n / 2] uint8, scale [rows, n / 32] uint8 -> [rows, n].

    Low nibble first; bit 3 of a code is the sign, the rest E2M1; a scale byte s means 2^(s - 127).
    """
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=dtype)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()
    values = torch.where(codes < 8, 1.0, -1.0).to(dtype) * magnitudes[codes % 8]
    return values * torch.exp2(scale.to(dtype) - 127).repeat_interleave(MXFP4_GROUP, dim=1)


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices [T, count] of the largest, ascending, ties to the lower; margin [T] over the rest."""
    ordered, indices = scores.sort(dim=-1, descending=True, stable=True)
    if count == scores.shape[-1]:
        margin = torch.full_like(ordered[:, 0], float("inf"))
    else:
        margin = ordered[:, count - 1] - ordered[:, count]
    return indices[:, :count].sort(dim=-1).values, margin


def _normalised(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def _rows_times(rows: Tensor, matrices: Tensor) -> Tensor:
    """One row times one matrix a head: [H, K], [H, K, V] -> [H, V]."""
    return (rows[:, None] @ matrices)[:, 0]


@contextmanager
def _one_thread() -> Iterator[None]:
    """The delta rule is thousands of tiny operations: waking a second thread costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)
