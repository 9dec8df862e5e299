"""The DSpark draft model, grouped-query form (arXiv 2607.05147; RadixArk/Kimi-K3-DSpark's tensors and names).

A draft reads the target's residual stream at a few layers as its context, and answers a block of masked
positions in one pass; a small Markov head then ties neighbouring tokens together. Two entries, no forward:

    write_context   target hidden states of committed tokens -> keys and values in the draft's cache
    draft           one block for each request -> logits that the Markov head turns into tokens

Both work on plain tensors and the draft's paged cache (which shares the target's token slots), so a step
costs no second round through SGLang's forward batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from sglang.srt.distributed import divide
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_k3.kernels.registry import Call, choose
from sglang_k3.models.config import ConfigError
from sglang_k3.models.dspark_config import DraftConfig
from sglang_k3.models.layers import K3LinearConfig, RMSNorm, attention_column, attention_replicated, weight
from sglang_k3.models.rotary import Rotary
from sglang_k3.models.runtime import activation_dtype, add_ranks, kernel_call


class DraftLayer(nn.Module):
    """A pre-norm transformer layer whose attention sees the context cache and the whole block."""

    def __init__(self, config: DraftConfig, quant_config, prefix: str) -> None:
        super().__init__()
        size = get_parallel().attn_tp_size
        hidden, width = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = divide(config.num_heads, size), divide(config.num_kv_heads, size)
        self.width, self.causal, self.eps = width, config.causal, config.eps
        column = partial(attention_column, quant_config=quant_config, prefix=prefix)
        row = partial(
            RowParallelLinear,
            bias=False,
            reduce_results=False,
            quant_config=quant_config,
            parallel_group="attn_tp",
        )
        merged = partial(
            MergedColumnParallelLinear,
            hidden,
            bias=False,
            quant_config=quant_config,
            parallel_group="attn_tp",
        )
        self.q_proj = column("q_proj", hidden, config.num_heads * width)
        self.kv_proj = merged([config.num_kv_heads * width] * 2, prefix=f"{prefix}.kv_proj")
        self.o_proj = row(config.num_heads * width, hidden, prefix=f"{prefix}.o_proj")
        self.gate_up_proj = merged([config.intermediate_size] * 2, prefix=f"{prefix}.gate_up_proj")
        self.down_proj = row(config.intermediate_size, hidden, prefix=f"{prefix}.down_proj")
        self.input_layernorm = RMSNorm(hidden, config.eps)
        self.post_attention_layernorm = RMSNorm(hidden, config.eps)
        self.q_norm, self.k_norm = RMSNorm(width, config.eps), RMSNorm(width, config.eps)
        self.activate = choose("activation.gated", kernel_call())
        call = kernel_call()
        self.attend = choose("block_attention", Call(call.device, call.dtype, dims={"D": width}))

    def keys_values(
        self, x: torch.Tensor, positions: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden], normed -> k (normed, rotated) and v, each [T, G, D]."""
        k, v = self.kv_proj(x)[0].view(-1, 2, self.kv_heads, self.width).unbind(1)
        k = self.k_norm(k.reshape(-1, self.width)).view(k.shape)
        return rotary(k, positions), v

    def forward(self, x, positions, rotary: Rotary, blocks: int, cache, table, rows, lengths) -> torch.Tensor:
        """x [N*B, hidden], N = blocks -> [N*B, hidden]. cache: (k, v), each [P, G, D]."""
        h = self.input_layernorm(x)
        q = self.q_norm(self.q_proj(h)[0].view(-1, self.width)).view(-1, self.heads, self.width)
        k, v = self.keys_values(h, positions, rotary)
        q, k, v = (part.unflatten(0, (blocks, -1)) for part in (rotary(q, positions), k, v))
        mixed = self.attend(q, k, v, *cache, table, rows, lengths, self.width**-0.5, self.causal)
        x = x + add_ranks(self.o_proj(mixed.reshape(x.shape[0], -1))[0])
        h = self.gate_up_proj(self.post_attention_layernorm(x))[0]
        return x + add_ranks(self.down_proj(self.activate(h, None, None))[0])


class MarkovHead(nn.Module):
    """Adds to the logits of a token what the token before it makes likely: w2 (w1[previous])."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.markov_w1 = weight(config.vocab_size, config.markov_rank)
        self.markov_w2 = weight(config.vocab_size, config.markov_rank)
        self.linear = choose("linear", kernel_call())
        self.activation_dtype = activation_dtype()

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[N] -> [N, rank]."""
        return nn.functional.embedding(tokens, self.markov_w1)

    def forward(self, embedded: torch.Tensor) -> torch.Tensor:
        """[N, rank] -> [N, vocabulary]."""
        return self.linear(embedded.to(self.activation_dtype), self.markov_w2)


class ConfidenceHead(nn.Module):
    """The probability that a drafted token is accepted if its predecessors are."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden] (after the final norm), embedded [N, rank] (of the token before) -> [N] fp32."""
        features = torch.cat([hidden, embedded.to(hidden.dtype)], -1) if self.with_markov else hidden
        return nn.functional.linear(features.float(), self.proj.weight.float(), self.proj.bias.float())[
            :, 0
        ].sigmoid()


class DSparkDraftModel(nn.Module):
    """Weights of a draft and its two entries. Embedding and head are the target's (`share`)."""

    def __init__(self, config: Any, quant_config=None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.draft_config = draft = DraftConfig.from_hf(config)
        linears = K3LinearConfig()
        self.fc = attention_replicated(
            draft.hidden_size * len(draft.taps), "fc", draft.hidden_size, quant_config=linears, prefix="model"
        )
        self.hidden_norm = RMSNorm(draft.hidden_size, draft.eps)
        self.layers = nn.ModuleList(
            DraftLayer(draft, linears, f"layers.{layer}") for layer in range(draft.num_layers)
        )
        self.norm = RMSNorm(draft.hidden_size, draft.eps)
        self.markov_head = MarkovHead(draft)
        self.confidence_head = ConfidenceHead(draft) if draft.confidence else None
        self.rotary = Rotary(draft, choose("rotary", kernel_call()))
        self.activation_dtype = activation_dtype()
        self.embed_tokens: nn.Module | None = None
        self.lm_head: Any = None

    def share(self, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        """Take the target's embedding and head."""
        self.embed_tokens, self.lm_head = embed_tokens, lm_head

    @torch.no_grad()
    def write_context(
        self, target_hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, pool: Any
    ) -> None:
        """Keys and values of T committed tokens into the draft's cache.

        target_hidden [T, taps * hidden]; positions and slots [T] int64, of the tokens themselves.
        """
        context = self.hidden_norm(self.fc(target_hidden.to(self.activation_dtype))[0])
        for index, layer in enumerate(cast(Iterable[DraftLayer], self.layers)):
            k, v = layer.keys_values(context, positions, self.rotary)
            keys, values = _rows(pool, index)
            keys[slots], values[slots] = k.to(keys.dtype), v.to(values.dtype)

    @torch.no_grad()
    def draft(
        self,
        anchors: torch.Tensor,
        context_lens: torch.Tensor,
        token_table: torch.Tensor,
        request_rows: torch.Tensor,
        pool: Any,
    ) -> torch.Tensor:
        """One masked block behind each request's anchor token.

        anchors [N]: the last committed token, whose own target state is not known yet. context_lens [N]:
        tokens in the draft's cache. token_table, request_rows: see `block_attention`. Returns [N, gamma,
        hidden] after the final norm; row k is about the token k + 1 places behind the anchor.
        """
        assert self.embed_tokens is not None, "share() the target's embedding first"
        draft = self.draft_config
        requests = anchors.shape[0]
        device = anchors.device
        ids = torch.full((requests, draft.gamma), draft.mask_token, dtype=torch.int64, device=device)
        ids[:, 0] = anchors
        positions = (context_lens.unsqueeze(1) + torch.arange(draft.gamma, device=device)).flatten()
        # Rows behind the last position are never accepted (the request ends there); any position will do.
        positions = positions.clamp(max=draft.max_positions - 1)
        x = self.embed_tokens(ids.flatten()).to(self.activation_dtype)
        for index, layer in enumerate(self.layers):
            cache = _rows(pool, index)
            x = layer(x, positions, self.rotary, requests, cache, token_table, request_rows, context_lens)
        return self.norm(x).view(requests, draft.gamma, -1)

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's head on [T, hidden] -> [T, vocabulary], whole on every rank."""
        logits = self.lm_head.quant_method.apply(self.lm_head, hidden)
        if get_parallel().tp_size > 1:
            from sglang.srt.distributed import tensor_model_parallel_all_gather

            logits = tensor_model_parallel_all_gather(logits)
        return logits[:, : self.draft_config.vocab_size]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Strict: raises ConfigError naming tensors that are missing, unknown, repeated or misshapen."""
        # Shapes are checked here, whole: on a CPU, SGLang's loaders fill up a part that is too small.
        shapes = self.draft_config.tensor_shapes()
        places = {
            source: (parameter, shard)
            for name, parameter in self.named_parameters()
            if not name.startswith(_SHARED)
            for source, shard in _checkpoint_names(name)
        }
        for given, tensor in weights:
            name = given.removeprefix("model.")
            if name not in places:
                raise ConfigError(f"unknown or repeated tensor {given} in the draft checkpoint")
            if tuple(tensor.shape) != shapes[name]:
                raise ConfigError(
                    f"tensor {given} of the draft has shape {list(tensor.shape)}, its config asks for "
                    f"{list(shapes[name])}"
                )
            parameter, shard = places.pop(name)
            loader: Any = getattr(parameter, "weight_loader", _copy)
            loader(parameter, tensor, *shard)
        if places:
            some = ", ".join(sorted(places)[:5])
            raise ConfigError(f"the draft checkpoint lacks {len(places)} tensors: {some}")


def _rows(pool: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's keys and values by token slot, [P, G, D]; an NPU's pool has an axis of pages before it."""
    return tuple(
        buffer[layer].view(-1, *buffer[layer].shape[-2:]) for buffer in (pool.k_buffer, pool.v_buffer)
    )  # type: ignore[return-value]


# The target's modules, which `share` hangs into this one.
_SHARED = ("embed_tokens.", "lm_head.")


def _copy(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    # Broadcasting would hide a parameter that is cut for a rank and has no loader.
    if parameter.shape != tensor.shape:
        raise RuntimeError(f"{tuple(tensor.shape)} is not {tuple(parameter.shape)}")
    parameter.data.copy_(tensor)


_MERGED = {
    ".kv_proj.": (".self_attn.k_proj.", ".self_attn.v_proj."),
    ".gate_up_proj.": (".mlp.gate_proj.", ".mlp.up_proj."),
}
_RENAMED = {
    ".q_proj.": ".self_attn.q_proj.",
    ".o_proj.": ".self_attn.o_proj.",
    ".q_norm.": ".self_attn.q_norm.",
    ".k_norm.": ".self_attn.k_norm.",
    ".down_proj.": ".mlp.down_proj.",
}


def _checkpoint_names(name: str) -> list[tuple[str, tuple[int, ...]]]:
    """The checkpoint tensors of one of our parameters, each with the shard its loader wants (or none)."""
    if name.startswith("markov_head."):
        return [(f"{name}.weight", ())]
    for merged, parts in _MERGED.items():
        if merged in name:
            return [(name.replace(merged, part), (shard,)) for shard, part in enumerate(parts)]
    for ours, theirs in _RENAMED.items():
        name = name.replace(ours, theirs)
    return [(name, ())]


EntryClass = DSparkDraftModel
