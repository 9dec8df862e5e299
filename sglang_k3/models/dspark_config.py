"""A DSpark draft's config, read strictly: each field is used, checked, or known to change nothing.

Covers the grouped-query drafts (RadixArk/Kimi-K3-DSpark and drafts in its format). A draft of another kind is
refused with the field that says so, because a field read wrongly shows as a low accept length only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_k3.models.config import ConfigError

ARCHITECTURE = "DSparkDraftModel"

_FIXED: dict[str, tuple[Any, ...]] = {
    # Fields with one value that this implementation computes.
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "sliding_window": (None,),
    "markov_head_type": ("vanilla",),
    "tie_word_embeddings": (False,),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "sample_from_anchor": (True,),
}
_WITHOUT_EFFECT = frozenset(
    # What transformers writes about itself, training, or generation.
    (
        "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path",
        "use_cache", "initializer_range", "attention_dropout", "max_window_layers", "return_dict",
        "output_hidden_states", "output_attentions", "problem_type", "chunk_size_feed_forward",
        "id2label", "label2id", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
        "decoder_start_token_id", "auto_map", "torchscript", "use_bfloat16", "pruned_heads",
        "finetuning_task", "task_specific_params", "tokenizer_class", "prefix", "tie_encoder_decoder",
        "cross_attention_hidden_size", "is_decoder", "name_or_path",
    )
)  # fmt: skip


@dataclass(frozen=True)
class DraftConfig:
    """Shapes and rules of one draft. gamma: drafted tokens a step. taps: target layers, 0-based."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    vocab_size: int
    max_positions: int
    gamma: int
    target_layers: int
    taps: tuple[int, ...]
    tap_offset: int
    mixture: bool
    mask_token: int
    markov_rank: int
    confidence: bool
    confidence_with_markov: bool
    causal: bool
    rope: Mapping[str, Any]

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """The target layers behind which the stream is tapped."""
        return tuple(layer + self.tap_offset for layer in self.taps)

    @property
    def cache_width(self) -> int:
        """Numbers that the draft's cache keeps of a token and layer, over all heads: a key and a value."""
        return 2 * self.num_kv_heads * self.head_dim

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a checkpoint, by name, with its whole shape."""
        hidden, inner, wide = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_heads * wide, self.num_kv_heads * wide
        layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (wide,),
            "self_attn.k_norm": (wide,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, hidden * len(self.taps)),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for index in range(self.num_layers):
            shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        shapes["markov_head.markov_w1.weight"] = (self.vocab_size, self.markov_rank)
        shapes["markov_head.markov_w2.weight"] = (self.vocab_size, self.markov_rank)
        if self.confidence:
            features = hidden + (self.markov_rank if self.confidence_with_markov else 0)
            shapes["confidence_head.proj.weight"] = (1, features)
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes

    @staticmethod
    def from_file(values: Mapping[str, Any]) -> DraftConfig:
        """From the content of config.json. Raises ConfigError naming the field, its value and the remedy."""
        return DraftConfig._read(_Fields(dict(values)), strict=True)

    @staticmethod
    def from_hf(config: Any) -> DraftConfig:
        """From SGLang's config object of a file that `from_file` has passed: SGLang adds fields of its
        own."""
        return DraftConfig._read(_Fields(config.to_dict()), strict=False)

    @staticmethod
    def _read(fields: _Fields, strict: bool) -> DraftConfig:
        nested = _Fields(
            fields.take("dflash_config", {}) | fields.take("dspark_config", {}), "dflash_config."
        )
        hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
        stream = nested.take("aux_hidden_stream", "mixture")
        if stream not in ("mixture", "prefix"):
            raise ConfigError(
                f"dflash_config.aux_hidden_stream {stream!r}: pass 'mixture' (the stream as the next layer "
                "reads it) or 'prefix' (the running sum)"
            )
        result = DraftConfig(
            hidden_size=hidden,
            num_layers=fields.need("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=fields.take("num_key_value_heads", heads),
            head_dim=fields.take("head_dim", hidden // heads),
            intermediate_size=fields.need("intermediate_size"),
            eps=fields.take("rms_norm_eps", 1e-6),
            vocab_size=fields.need("vocab_size"),
            max_positions=fields.need("max_position_embeddings"),
            gamma=fields.need("block_size"),
            target_layers=fields.need("num_target_layers"),
            taps=tuple(nested.need("target_layer_ids")),
            tap_offset=nested.take("target_layer_offset", 0),
            mixture=stream == "mixture",
            mask_token=nested.need("mask_token_id"),
            markov_rank=fields.need("markov_rank"),
            confidence=fields.take("enable_confidence_head", False),
            confidence_with_markov=fields.take("confidence_head_with_markov", False),
            causal=bool(fields.take("is_causal", False)),
            rope=_rope(fields),
        )
        for kind in fields.take("layer_types", None) or ():
            if kind != "full_attention":
                raise ConfigError(f"layer_types has {kind!r}: this draft model attends fully in every layer")
        if strict:
            fields.finish()
            nested.finish()
        result._check()
        return result

    def _check(self) -> None:
        for name, least in (
            ("num_layers", 1),
            ("gamma", 1),
            ("markov_rank", 1),
            ("hidden_size", 1),
            ("intermediate_size", 1),
            ("num_kv_heads", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} {getattr(self, name)} must be at least {least}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd: rotary embedding turns pairs")
        if not 0 <= self.mask_token < self.vocab_size:
            raise ConfigError(
                f"dflash_config.mask_token_id {self.mask_token} is outside the vocabulary "
                f"of {self.vocab_size}"
            )

    def check_target(self, *, hidden_size: int, vocab_size: int, num_layers: int, max_positions: int) -> None:
        """Raises ConfigError, with both values, unless the draft was trained for such a target."""
        for what, mine, theirs in (
            ("hidden_size", self.hidden_size, hidden_size),
            ("vocab_size", self.vocab_size, vocab_size),
            ("number of layers (the draft's num_target_layers)", self.target_layers, num_layers),
        ):
            if mine != theirs:
                raise ConfigError(
                    f"the draft expects a target with {what} {mine}, this one has {theirs}: pass "
                    "--speculative-draft-model-path of a draft that was trained for it"
                )
        outside = [layer for layer in self.tapped_layers if not 0 <= layer < num_layers]
        if outside or len(set(self.taps)) != len(self.taps):
            raise ConfigError(
                f"the draft taps layers {list(self.tapped_layers)}, but the target has layers "
                f"0..{num_layers - 1}, each once: check dflash_config.target_layer_ids and "
                "target_layer_offset"
            )
        if self.max_positions < max_positions:
            raise ConfigError(
                f"the draft has {self.max_positions} positions, the target serves {max_positions}: pass "
                f"--context-length {self.max_positions} or less"
            )


def _rope(fields: _Fields) -> dict[str, Any]:
    """Rotary parameters in transformers' present form, from it or from the older pair of fields."""
    given = fields.take("rope_parameters", None)
    scaling = fields.take("rope_scaling", None)
    theta = fields.take("rope_theta", None)
    rope = dict(given or scaling or {})
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    rope.setdefault("rope_type", "default")
    if theta is not None:
        rope.setdefault("rope_theta", theta)
    if rope["rope_type"] not in ("default", "yarn", "linear"):
        raise ConfigError(f"rope_type {rope['rope_type']!r} is not supported: default, linear or yarn")
    if "rope_theta" not in rope:
        raise ConfigError("the draft's config has no rope_theta")
    return rope


class _Fields:
    """Takes fields out one by one and refuses what is left."""

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self.values, self.prefix = dict(values), prefix

    def take(self, name: str, default: Any) -> Any:
        value = self.values.pop(name, None)
        return default if value is None else value

    def need(self, name: str) -> Any:
        value = self.take(name, None)
        if value is None:
            raise ConfigError(f"the draft's config lacks {self.prefix}{name}")
        return value

    def finish(self) -> None:
        for name, value in self.values.items():
            if name in _FIXED:
                if value not in _FIXED[name]:
                    allowed = " or ".join(map(repr, _FIXED[name]))
                    raise ConfigError(f"{self.prefix}{name} {value!r} is not supported in a draft: {allowed}")
            elif name not in _WITHOUT_EFFECT:
                raise ConfigError(f"unknown field {self.prefix}{name} = {value!r} in the draft's config")
