"""Config classes that SGLang's registry hands out for "kimi_linear" and "kimi_k3".

They differ from SGLang's in three ways: a text config in the transformers dialect is translated
first (SGLang's class would read it as a model of full-attention layers only, without a word), an
impossible config is refused here, and the convolution window of the state pool has the dtype of
the model (SGLang's default is bf16 whatever --dtype says).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.configs.kimi_k3 import KimiK3Config
from sglang.srt.configs.kimi_linear import KimiLinearConfig
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2StateDType,
    mamba2_state_dtype,
)
from sglang.srt.configs.model_config import _get_and_verify_dtype
from sglang.srt.runtime_context import get_model, get_parallel

from sglang_k3.models.config import K3Config


class K3CacheParams(KimiLinearCacheParams):
    """State shapes of one of our models; its own class, so that a pool can tell them from another model's."""


def state_params(
    *, heads: int, head_dim: int, conv_kernel: int, layers: list[int], ranks: int, dtype: Mamba2StateDType
) -> K3CacheParams:
    """The state of one request on one of `ranks` attention ranks. Server and planner both take it from here.

    heads, conv_kernel: of the whole model. layers: its KDA layers, 0-based.
    """
    shape = KimiLinearStateShape.create(
        tp_world_size=ranks, num_heads=heads, head_dim=head_dim, conv_kernel_size=conv_kernel
    )
    return K3CacheParams(shape=shape, layers=layers, dtype=dtype)  # type: ignore[call-arg]


class K3TextConfig(KimiLinearConfig):
    """Text config of Kimi K3 and Kimi Linear, from either dialect.

    Raises ConfigError for a config that can't be served.
    """

    def __init__(self, **values: Any):
        # transformers builds a bare instance to find out which keys have default values.
        if values:
            config = K3Config.from_hf(values)
            if config.dialect == "transformers":
                # Its own keys stay too: K3Config reads the dialect off them.
                values = {**_original_keys(config), **values}
        super().__init__(**values)

    @property
    def mamba2_cache_params(self) -> K3CacheParams:
        """State shapes of this rank; the window in the model's dtype. Needs published server args."""
        attention: Any = self.linear_attn_config
        return state_params(
            heads=attention["num_heads"],
            head_dim=attention["head_dim"],
            conv_kernel=attention["short_conv_kernel_size"],
            layers=self.linear_layer_ids,
            ranks=get_parallel().attn_tp_size,
            dtype=replace(mamba2_state_dtype(self), conv=serving_dtype(self)),
        )


class K3MultimodalConfig(KimiK3Config):
    """Top-level config of Kimi K3, with a K3TextConfig inside."""

    def __init__(self, text_config: dict[str, Any] | KimiLinearConfig | None = None, **values: Any):
        if text_config is None:
            text_config = K3TextConfig()
        elif isinstance(text_config, dict):
            text_config = K3TextConfig(**text_config)
        super().__init__(text_config=text_config, **values)


def serving_dtype(text_config: Any) -> torch.dtype:
    """The dtype that SGLang resolves for the model from --dtype and the config.

    SGLang keeps it on its ModelConfig alone, which a text config can't reach.
    """
    return _get_and_verify_dtype(text_config, get_model().dtype)


def _original_keys(config: K3Config) -> dict[str, Any]:
    """The keys of the original dialect that a file in the transformers dialect lacks."""
    return {
        "linear_attn_config": {
            "kda_layers": [layer + 1 for layer in config.kda_layers],
            "full_attn_layers": [layer + 1 for layer in config.mla_layers],
            "num_heads": config.kda.num_heads,
            "head_dim": config.kda.head_dim,
            "short_conv_kernel_size": config.kda.conv_kernel_size,
        },
        "first_k_dense_replace": min(config.moe_layers, default=config.num_layers),
        "max_position_embeddings": config.max_positions,
        "mla_use_nope": True,
    }
