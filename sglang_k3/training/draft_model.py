"""A DSpark draft in the form it is trained in: many blocks of a sequence at once, differentiable, fp32.

Names of modules and parameters are the checkpoint's. The served form is models/dspark_draft.py; a test holds
the two together.

B sequences, T tokens, A blocks of a sequence, G rows of a block (gamma), D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_k3.models.dspark_config import DraftConfig
from sglang_k3.models.rotary import Rotary
from sglang_k3.training.model import RMSNorm


class Attention(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        self.heads, self.groups, self.width = config.num_heads, config.num_kv_heads, width
        self.q_proj = nn.Linear(hidden, self.heads * width, bias=False)
        self.k_proj = nn.Linear(hidden, self.groups * width, bias=False)
        self.v_proj = nn.Linear(hidden, self.groups * width, bias=False)
        self.o_proj = nn.Linear(self.heads * width, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(width, config.eps), RMSNorm(width, config.eps)

    def keys_values(self, x: Tensor, positions: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """x [B, S, D], positions [B, S] -> k, v [B, groups, S, width]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.groups, -1)))
        v = self.v_proj(x).unflatten(-1, (self.groups, -1))
        return _turned(k, positions, rotary).transpose(1, 2), v.transpose(1, 2)

    def forward(
        self, x: Tensor, context: Tensor, at: Tensor, context_at: Tensor, seen: Tensor, rotary: Rotary
    ) -> Tensor:
        """x [B, A * G, D] at positions `at`, context [B, T, D]; seen [B, 1, A * G, T + A * G] bool."""
        q = _turned(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1))), at, rotary).transpose(1, 2)
        k, v = self.keys_values(context, context_at, rotary)
        own_k, own_v = self.keys_values(x, at, rotary)
        o = F.scaled_dot_product_attention(
            q, torch.cat([k, own_k], 2), torch.cat([v, own_v], 2), attn_mask=seen, enable_gqa=True
        )
        return self.o_proj(o.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.self_attn = Attention(config)
        self.mlp = GatedMLP(config)


class MarkovHead(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank * config.confidence_with_markov, 1)
        self.with_markov = config.confidence_with_markov

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """-> logits of "this draft is accepted", one a row."""
        features = torch.cat([hidden, embedded], -1) if self.with_markov else hidden
        return self.proj(features)[..., 0]


class TrainingDraft(nn.Module):
    """embedding and head [vocabulary, D] are the target's, and stay as they are."""

    embedding: Tensor
    head: Tensor

    def __init__(self, config: DraftConfig, embedding: Tensor, head: Tensor, seed: int = 0) -> None:
        super().__init__()
        self.draft_config = config
        self.fc = nn.Linear(config.hidden_size * len(config.taps), config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.eps)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config)
        self.rotary = Rotary(config)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        _initialise(self, seed)

    def forward(self, target_hidden: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """target_hidden [B, T, taps * D], tokens [B, T], anchors [B, A] (positions) -> [B, A, G, D].

        Row k of a block is about the token k + 1 places behind its anchor; it sees the target's hidden states
        in front of the anchor, and its own block.
        """
        config, (rows, blocks) = self.draft_config, anchors.shape
        at = (anchors.unsqueeze(2) + torch.arange(config.gamma)).flatten(1)
        ids = torch.full((rows, blocks, config.gamma), config.mask_token)
        ids[:, :, 0] = tokens.gather(1, anchors)
        x = F.embedding(ids.flatten(1), self.embedding)
        context = self.hidden_norm(self.fc(target_hidden))
        context_at = torch.arange(tokens.shape[1]).expand(rows, -1)
        seen = self._seen(anchors, tokens.shape[1])
        for layer in cast(Iterable[Layer], self.layers):
            x = x + layer.self_attn(layer.input_layernorm(x), context, at, context_at, seen, self.rotary)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).unflatten(1, (blocks, -1))

    def _seen(self, anchors: Tensor, length: int) -> Tensor:
        """[B, 1, A * G, T + A * G] bool: the context in front of the anchor, and the row's own block."""
        gamma = self.draft_config.gamma
        before = torch.arange(length) < anchors.repeat_interleave(gamma, 1).unsqueeze(2)
        block = torch.arange(anchors.shape[1]).repeat_interleave(gamma)
        own = (block.unsqueeze(1) == block).expand(anchors.shape[0], -1, -1)
        if self.draft_config.causal:
            own = own & torch.ones(own.shape[1:], dtype=torch.bool).tril()
        return torch.cat([before, own], 2).unsqueeze(1)

    def logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """hidden [..., D] and the token in front of each row's -> [..., vocabulary]."""
        base = F.linear(hidden, self.head)
        return base + self.markov_head.markov_w2(self.markov_head.markov_w1(previous))

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits; trains the confidence head alone."""
        return self.confidence_head(hidden.detach(), self.markov_head.markov_w1(previous).detach())


def _turned(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """x [B, S, H, width], positions [B, S]."""
    return rotary(x.flatten(0, 1), positions.flatten()).view_as(x)


@torch.no_grad()
def _initialise(model: TrainingDraft, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.startswith("markov_head"):
            parameter.normal_(0.0, 0.02, generator=generator)
        elif name.startswith("confidence_head"):
            parameter.zero_()
        elif parameter.dim() == 2:
            small = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            parameter.normal_(0.0, small * parameter.shape[1] ** -0.5, generator=generator)
