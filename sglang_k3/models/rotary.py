"""Rotary position embedding of a DSpark draft, by transformers' own tables of frequencies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sglang_k3.kernels.rotary import reference
from sglang_k3.models.dspark_config import DraftConfig

_Holder: Any = PretrainedConfig
"""Takes any field, which its signature does not say."""


class Rotary(nn.Module):
    """Rotary position embedding over whole heads; the first half of a head pairs with the second."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: DraftConfig, turn: Callable[..., torch.Tensor] = reference.rotary) -> None:
        """turn: the implementation of the operator "rotary"."""
        super().__init__()
        self.turn = turn
        rope = dict(config.rope)
        width, kind = config.head_dim, rope["rope_type"]
        if kind == "default":
            frequencies = rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
            factor = 1.0
        else:
            holder = _Holder(
                head_dim=width,
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_heads,
                max_position_embeddings=config.max_positions,
                rope_parameters=rope,
            )
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](holder, torch.device("cpu"))
        angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos() * factor, persistent=False)
        self.register_buffer("sin", angles.sin() * factor, persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T, H, D], positions [T] int64 -> [T, H, D] in x's dtype."""
        return self.turn(x, self.cos[positions], self.sin[positions])
