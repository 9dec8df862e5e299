"""Reading of the three config dialects into a K3Config; see `K3Config.from_hf`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from sglang_k3.models.config import (
    MXFP4_GROUP,
    ConfigError,
    Dialect,
    K3Config,
    KDAConfig,
    MLAConfig,
    MoEConfig,
    VisionConfig,
)

_MISSING = object()
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TRANSFORMERS_LATENT_EPS = 1e-6


class _Reader:
    """Typed access to a raw config; each accessor takes a key and its other spellings."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def get(self, *keys: str, default: Any = _MISSING) -> Any:
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                return value
        if default is _MISSING:
            raise ConfigError(f"the config has no {keys[0]!r}: add it to config.json")
        return default

    def size(self, *keys: str, default: Any = _MISSING) -> int:
        value = self.get(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{keys[0]}={value!r} is not a positive integer: correct config.json")
        return value

    def optional_size(self, *keys: str) -> int | None:
        return None if self.get(*keys, default=None) is None else self.size(*keys)

    def refuse(self, key: str, accepted: Iterable[Any], remedy: str) -> None:
        """ConfigError unless the value is absent or one of those accepted."""
        value = self.values.get(key)
        if value is not None and value not in accepted:
            raise ConfigError(f"{key}={value!r} is not supported: {remedy}")


def normalise(config: Any) -> K3Config:
    """See `K3Config.from_hf`."""
    top = _as_dict(config)
    text = _as_dict(top["text_config"]) if top.get("text_config") is not None else top
    # SGLang lifts the block to the top level; the file has it in the text config.
    quantization = text.get("quantization_config") or top.get("quantization_config")
    raw = _Reader(text)
    dialect = _dialect(top, text)
    _refuse_what_is_not_implemented(raw, dialect)

    num_layers = raw.size("num_hidden_layers")
    eps = float(raw.get("rms_norm_eps", default=1e-5))
    beta, linear_beta = _activation(raw)
    return K3Config(
        dialect=dialect,
        name_prefix="" if text is top else "language_model.",
        dtype=_dtype(text, top),
        vocab_size=raw.size("vocab_size"),
        hidden_size=raw.size("hidden_size"),
        num_layers=num_layers,
        intermediate_size=raw.size("intermediate_size"),
        rms_norm_eps=eps,
        situ_beta=beta,
        situ_linear_beta=linear_beta,
        residual_block_size=raw.optional_size("attn_res_block_size"),
        max_positions=raw.size("max_position_embeddings", "model_max_length", default=1048576),
        kda_layers=_kda_layers(text),
        moe_layers=_moe_layers(raw, num_layers, dialect),
        kda=_kda(raw, dialect),
        mla=_mla(raw, eps, dialect),
        moe=_moe(raw, quantization),
        vision=_vision(top, raw.size("hidden_size")),
    )


def _kda_layers(text: Mapping[str, Any]) -> tuple[int, ...]:
    """0-based KDA layers of a text config in either dialect.

    Raises ConfigError when the lists overlap, leave a layer out, name one that does not exist,
    disagree with each other, or hold no KDA layer at all.
    """
    num_layers = _Reader(text).size("num_hidden_layers")
    types = text.get("layer_types")
    lists = text.get("linear_attn_config")
    from_types = None if types is None else _from_layer_types(types, num_layers)
    from_lists = None if lists is None else _from_lists(_as_dict(lists), num_layers)
    if from_types is not None and from_lists is not None and from_types != from_lists:
        raise ConfigError(
            f"layer_types says the KDA layers are {list(from_types)}, linear_attn_config says "
            f"{list(from_lists)} (both counted from 0): remove one of them from config.json"
        )
    layers = from_types if from_types is not None else from_lists
    if not layers:
        raise ConfigError(
            "a Kimi model without a KDA layer: give linear_attn_config with kda_layers and "
            "full_attn_layers (1-based), or layer_types with 'linear_attention' entries"
        )
    return layers


def _is_transformers_dialect(text: Mapping[str, Any]) -> bool:
    """Whether a text config uses the keys of the port in transformers 5."""
    return "linear_num_heads" in text or (
        text.get("layer_types") is not None and text.get("linear_attn_config") is None
    )


def _as_dict(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "to_dict"):
        return config.to_dict()
    return dict(vars(config))


def _dialect(top: Mapping[str, Any], text: Mapping[str, Any]) -> Dialect:
    if _is_transformers_dialect(text):
        return "transformers"
    return "original" if text is top else "k3"


def _refuse_what_is_not_implemented(raw: _Reader, dialect: Dialect) -> None:
    raw.refuse("attention_bias", (False,), "Kimi's projections have no bias; set it to false")
    raw.refuse("tie_word_embeddings", (False,), "store lm_head.weight and set it to false")
    raw.refuse("num_nextn_predict_layers", (0,), "remove the MTP layers and set it to 0")
    raw.refuse("topk_method", ("noaux_tc",), "use 'noaux_tc' (biased top-k)")
    if dialect != "transformers" and raw.get("mla_use_nope", default=False) is not True:
        raise ConfigError(
            f"mla_use_nope={raw.values.get('mla_use_nope')!r}: rotated MLA is not supported, "
            "only models trained with mla_use_nope=true"
        )
    heads = raw.size("num_attention_heads")
    kv_heads = raw.size("num_key_value_heads", default=heads)
    if kv_heads != heads:
        raise ConfigError(
            f"num_key_value_heads={kv_heads} differs from num_attention_heads={heads}: MLA has one "
            "key per head, set them to the same number"
        )


def _from_layer_types(types: Any, num_layers: int) -> tuple[int, ...]:
    unknown = sorted(set(types) - {"linear_attention", "full_attention"})
    if unknown:
        raise ConfigError(
            f"layer_types holds {unknown[0]!r}: only 'linear_attention' and 'full_attention' exist"
        )
    if len(types) != num_layers:
        raise ConfigError(
            f"layer_types has {len(types)} entries for num_hidden_layers={num_layers}: give one entry a layer"
        )
    return tuple(layer for layer, kind in enumerate(types) if kind == "linear_attention")


def _from_lists(linear: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    kda = [layer - 1 for layer in linear.get("kda_layers") or ()]
    full = [layer - 1 for layer in linear.get("full_attn_layers") or ()]
    layers = range(num_layers)
    twice = sorted({layer for layer in kda + full if (kda + full).count(layer) > 1})
    left_out = sorted(set(layers) - set(kda) - set(full))
    outside = sorted(set(kda + full) - set(layers))
    for numbers, what, remedy in (
        (twice, "named twice in", "name each layer once"),
        (left_out, "missing from", "put each layer in kda_layers or full_attn_layers"),
        (outside, "outside the model in", f"the lists run from 1 to num_hidden_layers={num_layers}"),
    ):
        if numbers:
            one_based = [layer + 1 for layer in numbers]
            raise ConfigError(f"layers {one_based} (1-based) are {what} linear_attn_config: {remedy}")
    return tuple(sorted(kda))


def _moe_layers(raw: _Reader, num_layers: int, dialect: Dialect) -> tuple[int, ...]:
    if raw.get("num_experts", "num_local_experts", "n_routed_experts", default=None) is None:
        return ()
    types = raw.get("mlp_layer_types", default=None)
    if types is not None:
        unknown = sorted(set(types) - {"dense", "sparse"})
        if unknown or len(types) != num_layers:
            raise ConfigError(
                f"mlp_layer_types={list(types)!r}: give 'dense' or 'sparse' for each of the "
                f"{num_layers} layers"
            )
        return tuple(layer for layer, kind in enumerate(types) if kind == "sparse")
    first = raw.get("first_k_dense_replace", default=1 if dialect == "transformers" else 0)
    frequency = raw.size("moe_layer_freq", default=1)
    return tuple(layer for layer in range(first, num_layers) if layer % frequency == 0)


def _activation(raw: _Reader) -> tuple[float | None, float | None]:
    name = raw.get("hidden_act", default="silu")
    if name == "silu":
        return None, None
    if name == "situ":
        return float(raw.get("activation_situ_beta")), float(raw.get("activation_situ_linear_beta"))
    raise ConfigError(f"hidden_act={name!r} is not supported: use 'situ' (K3) or 'silu'")


def _kda(raw: _Reader, dialect: Dialect) -> KDAConfig:
    linear = _Reader(_as_dict(raw.get("linear_attn_config", default={})))
    bound = linear.get("gate_lower_bound", default=None)
    # The chunked form needs 16 rows of decay to stay inside fp32: 16 * 5 < 88.
    if bound is not None and not -5.0 <= bound < 0.0:
        raise ConfigError(f"gate_lower_bound={bound!r} is not in [-5, 0): correct linear_attn_config")
    from_transformers = dialect == "transformers"
    keys = (
        ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        if from_transformers
        else ("num_heads", "head_dim", "short_conv_kernel_size")
    )
    source = raw if from_transformers else linear
    head_dim = source.size(keys[1])
    full_rank = bool(linear.get("use_full_rank_gate", default=False))
    kernel = source.size(keys[2], default=4)
    if kernel < 2:
        raise ConfigError(f"{keys[2]}={kernel}: a short convolution needs at least 2 taps")
    return KDAConfig(
        num_heads=source.size(keys[0]),
        head_dim=head_dim,
        conv_kernel_size=kernel,
        gate_lower_bound=None if bound is None else float(bound),
        # The low-rank gate's rank is the head width in every published file; none names it.
        output_gate_rank=None if full_rank else head_dim,
    )


def _mla(raw: _Reader, eps: float, dialect: Dialect) -> MLAConfig:
    latent_eps = _TRANSFORMERS_LATENT_EPS if dialect == "transformers" else eps
    return MLAConfig(
        num_heads=raw.size("num_attention_heads"),
        q_lora_rank=raw.optional_size("q_lora_rank"),
        kv_lora_rank=raw.size("kv_lora_rank"),
        qk_nope_head_dim=raw.size("qk_nope_head_dim"),
        qk_rope_head_dim=raw.size("qk_rope_head_dim"),
        v_head_dim=raw.size("v_head_dim"),
        output_gate=bool(raw.get("mla_use_output_gate", default=False)),
        q_norm_eps=float(raw.get("q_a_layernorm_eps", default=latent_eps)),
        kv_norm_eps=float(raw.get("kv_a_layernorm_eps", default=latent_eps)),
    )


def _moe(raw: _Reader, quantization: Any) -> MoEConfig | None:
    experts = raw.optional_size("num_experts", "num_local_experts", "n_routed_experts")
    if experts is None:
        return None
    top_k = raw.size("num_experts_per_token", "num_experts_per_tok")
    if top_k > experts:
        raise ConfigError(f"num_experts_per_token={top_k} is more than num_experts={experts}")
    grouped = raw.get("use_grouped_topk", default=True)
    groups = raw.size("num_expert_group", "n_group", default=1) if grouped else 1
    top_groups = raw.size("topk_group", default=1) if grouped else 1
    if experts % groups or top_groups > groups:
        raise ConfigError(
            f"num_expert_group={groups}, topk_group={top_groups}: the groups must divide "
            f"num_experts={experts}, and topk_group can't exceed their number"
        )
    activation = raw.get("moe_router_activation_func", default="sigmoid")
    if activation not in ("sigmoid", "softmax"):
        raise ConfigError(
            f"moe_router_activation_func={activation!r} is not supported: use 'sigmoid' or 'softmax'"
        )
    moe = MoEConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=raw.size("moe_intermediate_size"),
        num_shared_experts=int(raw.get("num_shared_experts", "n_shared_experts", default=0)),
        latent_size=raw.optional_size("routed_expert_hidden_size"),
        latent_norm=bool(raw.get("latent_moe_use_norm", default=False)),
        router_activation=activation,
        renormalize=bool(raw.get("moe_renormalize", "norm_topk_prob", default=True)),
        routed_scaling_factor=float(raw.get("routed_scaling_factor", default=1.0)),
        num_groups=groups,
        top_k_groups=top_groups,
        packed=_packed(quantization),
    )
    widths = (moe.intermediate_size, moe.latent_size or raw.size("hidden_size"))
    if moe.packed and any(width % MXFP4_GROUP for width in widths):
        raise ConfigError(
            f"experts of {widths[1]} x {widths[0]} can't be packed as MXFP4: both must be "
            f"multiples of {MXFP4_GROUP}"
        )
    return moe


def _packed(quantization: Any) -> bool:
    if not quantization:
        return False
    block = _as_dict(quantization)
    name = block.get("format") or block.get("quant_method")
    if name != "mxfp4-pack-quantized":
        raise ConfigError(
            f"quantization format {name!r} is not supported: use 'mxfp4-pack-quantized' "
            "(compressed-tensors), or remove quantization_config for plain weights"
        )
    for group in block.get("config_groups", {}).values():
        size = (group.get("weights") or {}).get("group_size")
        if size != MXFP4_GROUP:
            raise ConfigError(f"group_size={size!r}: MXFP4 has one scale for {MXFP4_GROUP} columns")
    return True


def _vision(top: Mapping[str, Any], hidden_size: int) -> VisionConfig | None:
    if top.get("vision_config") is None:
        return None
    raw = _Reader(_as_dict(top["vision_config"]))
    width = raw.size("vt_hidden_size")
    merge = raw.get("merge_kernel_size", default=(2, 2))
    return VisionConfig(
        patch_size=raw.size("patch_size"),
        hidden_size=width,
        intermediate_size=raw.size("vt_intermediate_size"),
        qkv_size=raw.size("qkv_hidden_size"),
        num_layers=raw.size("vt_num_hidden_layers"),
        position_height=raw.size("init_pos_emb_height"),
        position_width=raw.size("init_pos_emb_width"),
        merged_size=width * merge[0] * merge[1],
        text_hidden_size=hidden_size,
    )


def _dtype(text: Mapping[str, Any], top: Mapping[str, Any]) -> torch.dtype:
    for source in (text, top):
        value = source.get("dtype") or source.get("torch_dtype")
        if value is None:
            continue
        name = str(value).removeprefix("torch.")
        if name not in _DTYPES:
            raise ConfigError(f"dtype={name!r} is not supported: use one of {', '.join(_DTYPES)}")
        return _DTYPES[name]
    return torch.bfloat16
