"""One description of a Kimi K3 or Kimi Linear text model, whatever file it came from.

Three dialects of config.json are read:

- "k3": Kimi K3's own, a top level with `text_config` (and `vision_config`);
- "original": Kimi Linear as Moonshot publishes it, `linear_attn_config` with 1-based layer lists
  (K3's `text_config` uses the same keys);
- "transformers": the port in transformers 5, `layer_types`, `mlp_layer_types`, `linear_num_heads`.

Everything after this module counts layers from 0 and never looks at the raw config again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Dialect = Literal["k3", "original", "transformers"]

MXFP4_GROUP = 32
"""Columns that share one scale byte in a packed expert matrix (OCP MX)."""


class ConfigError(ValueError):
    """A model config that can't be served; the message names the value and the remedy."""


@dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention layers. Keys and values have the same width.

    gate_lower_bound: None selects the softplus decay of Kimi Linear, a negative number the bounded
    one of K3. output_gate_rank: None for a full-rank output gate (g_proj), else the rank of
    g_b_proj(g_a_proj(x)).
    """

    num_heads: int
    head_dim: int
    conv_kernel_size: int
    gate_lower_bound: float | None
    output_gate_rank: int | None

    @property
    def projection_size(self) -> int:
        """Channels of one of q, k, v over all heads."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention without rotation: the "rope" part enters the score unrotated.

    q_lora_rank None means one q_proj. q_norm_eps and kv_norm_eps belong to the norms of the two
    latents; published implementations disagree on them (see `K3Config.from_hf`).
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    output_gate: bool
    q_norm_eps: float
    kv_norm_eps: float

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Numbers that the cache keeps of a token and layer: the normed latent and the rope part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return self.qk_head_dim**-0.5


@dataclass(frozen=True)
class MoEConfig:
    """Routed and shared experts.

    latent_size None means that the experts read and write the hidden size. packed: the routed
    experts are stored as MXFP4 (`weight_packed`, `weight_scale`).
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    num_shared_experts: int
    latent_size: int | None
    latent_norm: bool
    router_activation: Literal["sigmoid", "softmax"]
    renormalize: bool
    routed_scaling_factor: float
    num_groups: int
    top_k_groups: int
    packed: bool

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts, which are stored as one MLP."""
        return self.intermediate_size * self.num_shared_experts


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the vision tower and projector; enough to name their tensors."""

    patch_size: int
    hidden_size: int
    intermediate_size: int
    qkv_size: int
    num_layers: int
    position_height: int
    position_width: int
    merged_size: int
    text_hidden_size: int


@dataclass(frozen=True)
class K3Config:
    """The text model. Layer numbers are 0-based.

    situ_beta and situ_linear_beta are None where the MLPs use plain SiLU. residual_block_size None
    means a classic residual stream, else attention residuals with that many layers a block
    (arXiv 2603.15031). name_prefix is what the checkpoint puts before "model." and "lm_head.".
    """

    dialect: Dialect
    name_prefix: str
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    rms_norm_eps: float
    situ_beta: float | None
    situ_linear_beta: float | None
    residual_block_size: int | None
    max_positions: int
    kda_layers: tuple[int, ...]
    moe_layers: tuple[int, ...]
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig | None
    vision: VisionConfig | None

    @classmethod
    def from_hf(cls, config: Any) -> K3Config:
        """Normalise a Hugging Face config: an object, or the dictionary of a config.json.

        The eps of the norms of MLA's latents is read from `q_a_layernorm_eps` and
        `kv_a_layernorm_eps` where the config has them. Without them it is `rms_norm_eps`, as in
        SGLang; in the transformers dialect it is 1e-6, which that implementation hard-codes.

        Raises ConfigError.
        """
        from sglang_k3.models.config_dialects import normalise

        return normalise(config)

    @property
    def activation(self) -> Literal["situ", "silu"]:
        return "silu" if self.situ_beta is None else "situ"

    @property
    def mla_layers(self) -> tuple[int, ...]:
        kda = set(self.kda_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in kda)

    def is_kda(self, layer: int) -> bool:
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        return layer in self.moe_layers

    def starts_block(self, layer: int) -> bool:
        """Whether the partial sum joins the bank, and starts anew, in front of this layer."""
        return self.residual_block_size is not None and layer % self.residual_block_size == 0

    @property
    def block_starts(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if self.starts_block(layer))

    def bank_rows(self, layer: int) -> int:
        """Rows of the bank that the mix in front of this layer's attention reads.

        `bank_rows(num_layers)` is what the mix behind the last layer reads. The mix in front of a
        layer's MLP reads one more where the layer starts a block.
        """
        return 0 if self.residual_block_size is None else -(-layer // self.residual_block_size)

    @property
    def expert_size(self) -> int:
        """Width that routed experts read and write: the latent size, or the hidden size."""
        if self.moe is None or self.moe.latent_size is None:
            return self.hidden_size
        return self.moe.latent_size
