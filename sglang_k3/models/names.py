"""Every tensor of a checkpoint: its name, its shape, and the parameter of ours that it fills.

One table serves the loader, the planner, the checkpoint generator and the tests. Names inside the
table are canonical: without the "language_model." prefix of K3, and with "mlp." where a checkpoint
says "block_sparse_moe.".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from sglang_k3.models.config import MXFP4_GROUP, K3Config, VisionConfig

VISION_PREFIXES = ("vision_tower.", "mm_projector.")
"""Tensors of the vision part, which the text model leaves alone."""

A_LOG_PADDING = 128
"""K3 stores A_log with its head count rounded up to this; only the first heads mean anything."""

ExpertMatrix = Literal["w1", "w2", "w3"]
ExpertPart = Literal["weight", "weight_packed", "weight_scale"]


class ExpertShard(NamedTuple):
    """One matrix of one routed expert. w1 is the gate, w3 the up and w2 the down projection."""

    expert: int
    matrix: ExpertMatrix


class CheckpointTensor(NamedTuple):
    """A tensor as a checkpoint stores it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Rule(NamedTuple):
    """A canonical name (without "model.layers.N."), its shape, and where it goes.

    dtype None stands for the model's dtype. shard is what the parameter's weight_loader takes as
    its third argument, None where it takes two.
    """

    name: str
    shape: tuple[int, ...]
    parameter: str
    shard: int | ExpertShard | None = None
    dtype: torch.dtype | None = None


def model_rules(config: K3Config) -> Iterator[Rule]:
    """Tensors outside the layers; names and parameters are whole."""
    hidden = config.hidden_size
    table = (config.vocab_size, hidden)
    yield _same("model.embed_tokens.weight", table)
    yield _same("lm_head.weight", table)
    yield _same("model.norm.weight", (hidden,))
    if config.residual_block_size is not None:
        yield _same("model.output_attn_res_norm.weight", (hidden,))
        yield _same("model.output_attn_res_proj.weight", (1, hidden))


def layer_rules(config: K3Config, layer: int) -> Iterator[Rule]:
    """Tensors of one layer apart from its routed experts."""
    hidden = config.hidden_size
    yield _same("input_layernorm.weight", (hidden,))
    yield _same("post_attention_layernorm.weight", (hidden,))
    if config.residual_block_size is not None:
        for half in ("self_attention", "mlp"):
            yield _same(f"{half}_res_norm.weight", (hidden,))
            yield _same(f"{half}_res_proj.weight", (1, hidden))
    yield from _kda_rules(config) if config.is_kda(layer) else _mla_rules(config)
    yield from (
        _moe_rules(config) if config.is_moe(layer) else _mlp_rules("mlp", hidden, config.intermediate_size)
    )


def expert_parts(config: K3Config) -> tuple[ExpertPart, ...]:
    """The tensors that one expert matrix is stored as."""
    packed = config.moe is not None and config.moe.packed
    return ("weight_packed", "weight_scale") if packed else ("weight",)


def expert_rule(config: K3Config, shard: ExpertShard, part: ExpertPart) -> Rule:
    """One stored tensor of one routed expert."""
    assert config.moe is not None, "the model has no routed experts"
    inner, outer = config.moe.intermediate_size, config.expert_size
    rows, columns = (outer, inner) if shard.matrix == "w2" else (inner, outer)
    if part == "weight_packed":
        columns //= 2
    elif part == "weight_scale":
        columns //= MXFP4_GROUP
    stack = "w2" if shard.matrix == "w2" else "w13"
    return Rule(
        name=f"mlp.experts.{shard.expert}.{shard.matrix}.{part}",
        shape=(rows, columns),
        parameter=f"mlp.experts.{stack}{part.removeprefix('weight')}",
        shard=shard,
        dtype=None if part == "weight" else torch.uint8,
    )


def expert_rules(config: K3Config) -> Iterator[Rule]:
    """All stored tensors of one layer's routed experts."""
    if config.moe is None:
        return
    for expert in range(config.moe.num_experts):
        for matrix in ("w1", "w2", "w3"):
            for part in expert_parts(config):
                yield expert_rule(config, ExpertShard(expert, matrix), part)


def expected_names(config: K3Config) -> Iterator[CheckpointTensor]:
    """Every tensor of the config's checkpoint, the vision part included where the config has one."""
    for rule in model_rules(config):
        yield CheckpointTensor(config.name_prefix + rule.name, rule.shape, rule.dtype or config.dtype)
    for layer in range(config.num_layers):
        rules = list(layer_rules(config, layer))
        if config.is_moe(layer):
            rules += expert_rules(config)
        section = _mlp_section(config, layer)
        for rule in rules:
            name = section + rule.name.removeprefix("mlp.") if rule.name.startswith("mlp.") else rule.name
            yield CheckpointTensor(
                f"{config.name_prefix}model.layers.{layer}.{name}",
                rule.shape,
                rule.dtype or config.dtype,
            )
    if config.vision is not None:
        yield from _vision_tensors(config.vision, config.dtype)


def canonical(name: str) -> str:
    """A checkpoint's name in the spelling of the table."""
    return name.removeprefix("language_model.").replace(".block_sparse_moe.", ".mlp.", 1)


def is_vision(name: str) -> bool:
    """Whether a checkpoint tensor belongs to the vision part."""
    return name.startswith(VISION_PREFIXES)


def logical_parameters(tensor: CheckpointTensor) -> int:
    """Parameters a tensor stands for: two to a packed byte, none for a scale."""
    count = 1
    for size in tensor.shape:
        count *= size
    if tensor.name.endswith(".weight_packed"):
        return 2 * count
    return 0 if tensor.name.endswith(".weight_scale") else count


def _same(name: str, shape: tuple[int, ...]) -> Rule:
    return Rule(name, shape, parameter=name)


def _mlp_section(config: K3Config, layer: int) -> str:
    # transformers renames every MLP back on saving, the dense one too.
    moe_name = config.is_moe(layer) or config.dialect == "transformers"
    return "block_sparse_moe." if moe_name else "mlp."


def _kda_rules(config: K3Config) -> Iterator[Rule]:
    kda, hidden = config.kda, config.hidden_size
    width = kda.projection_size
    at = "self_attn."
    for shard, which in enumerate("qkv"):
        yield Rule(f"{at}{which}_proj.weight", (width, hidden), f"{at}in_proj.weight", shard)
    yield Rule(f"{at}b_proj.weight", (kda.num_heads, hidden), f"{at}in_proj.weight", 3)
    for shard, which in enumerate("qkv"):
        yield Rule(
            f"{at}{which}_conv1d.weight",
            (width, 1, kda.conv_kernel_size),
            f"{at}conv_weight",
            shard,
            torch.float32,
        )
    if kda.output_gate_rank is None:
        yield Rule(f"{at}g_proj.weight", (width, hidden), f"{at}in_proj.weight", 4)
    else:
        yield _same(f"{at}g_a_proj.weight", (kda.output_gate_rank, hidden))
        yield _same(f"{at}g_b_proj.weight", (width, kda.output_gate_rank))
    yield _same(f"{at}f_a_proj.weight", (kda.head_dim, hidden))
    yield _same(f"{at}f_b_proj.weight", (width, kda.head_dim))
    yield Rule(f"{at}A_log", _a_log_shape(config), f"{at}A_log", None, torch.float32)
    yield Rule(f"{at}dt_bias", (width,), f"{at}dt_bias", None, torch.float32)
    yield Rule(f"{at}o_norm.weight", (kda.head_dim,), f"{at}o_norm_weight", None, torch.float32)
    yield _same(f"{at}o_proj.weight", (hidden, width))


def _a_log_shape(config: K3Config) -> tuple[int, ...]:
    heads = config.kda.num_heads
    if config.dialect == "k3":
        return (-(-heads // A_LOG_PADDING) * A_LOG_PADDING,)
    return (1, 1, heads, 1)


def _mla_rules(config: K3Config) -> Iterator[Rule]:
    mla, hidden = config.mla, config.hidden_size
    at = "self_attn."
    queries = mla.num_heads * mla.qk_head_dim
    values = mla.num_heads * mla.v_head_dim
    if mla.q_lora_rank is None:
        yield _same(f"{at}q_proj.weight", (queries, hidden))
    else:
        yield _same(f"{at}q_a_proj.weight", (mla.q_lora_rank, hidden))
        yield _same(f"{at}q_a_layernorm.weight", (mla.q_lora_rank,))
        yield _same(f"{at}q_b_proj.weight", (queries, mla.q_lora_rank))
    yield _same(f"{at}kv_a_proj_with_mqa.weight", (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden))
    yield _same(f"{at}kv_a_layernorm.weight", (mla.kv_lora_rank,))
    yield _same(
        f"{at}kv_b_proj.weight",
        (mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
    )
    if mla.output_gate:
        yield Rule(f"{at}g_proj.weight", (values, hidden), f"{at}gate_proj.weight")
    yield _same(f"{at}o_proj.weight", (hidden, values))


def _mlp_rules(at: str, hidden: int, width: int) -> Iterator[Rule]:
    for shard, which in enumerate(("gate", "up")):
        yield Rule(f"{at}.{which}_proj.weight", (width, hidden), f"{at}.gate_up_proj.weight", shard)
    yield _same(f"{at}.down_proj.weight", (hidden, width))


def _moe_rules(config: K3Config) -> Iterator[Rule]:
    assert config.moe is not None, "a MoE layer without experts"
    moe, hidden = config.moe, config.hidden_size
    yield Rule("mlp.gate.weight", (moe.num_experts, hidden), "mlp.router.weight")
    yield Rule(
        "mlp.gate.e_score_correction_bias",
        (moe.num_experts,),
        "mlp.router.e_score_correction_bias",
        None,
        torch.float32,
    )
    if moe.latent_size is not None:
        latent = moe.latent_size
        yield Rule("mlp.routed_expert_down_proj.weight", (latent, hidden), "mlp.latent_down.weight")
        if moe.latent_norm:
            yield Rule("mlp.routed_expert_norm.weight", (latent,), "mlp.latent_norm.weight")
        yield Rule("mlp.routed_expert_up_proj.weight", (hidden, latent), "mlp.latent_up.weight")
    if moe.num_shared_experts:
        yield from _mlp_rules("mlp.shared_experts", hidden, moe.shared_intermediate_size)


def _vision_tensors(vision: VisionConfig, dtype: torch.dtype) -> Iterator[CheckpointTensor]:
    width, inner, qkv = vision.hidden_size, vision.intermediate_size, vision.qkv_size
    tower: list[tuple[str, tuple[int, ...]]] = [
        ("patch_embed.proj", (width, 3, vision.patch_size, vision.patch_size)),
        ("patch_embed.pos_emb", (vision.position_height, vision.position_width, width)),
    ]
    for block in range(vision.num_layers):
        tower += [
            (f"encoder.blocks.{block}.{name}", shape)
            for name, shape in (
                ("wqkv", (3 * qkv, width)),
                ("wo", (width, qkv)),
                ("mlp.fc0", (inner, width)),
                ("mlp.fc1", (width, inner)),
                ("norm0", (width,)),
                ("norm1", (width,)),
            )
        ]
    tower.append(("encoder.final_layernorm", (width,)))
    projector: list[tuple[str, tuple[int, ...]]] = [
        ("proj.0", (vision.merged_size, vision.merged_size)),
        ("proj.2", (vision.text_hidden_size, vision.merged_size)),
        ("post_norm", (vision.text_hidden_size,)),
    ]
    for prefix, tensors in zip(VISION_PREFIXES, (tower, projector), strict=True):
        for name, shape in tensors:
            yield CheckpointTensor(f"{prefix}{name}.weight", shape, dtype)
