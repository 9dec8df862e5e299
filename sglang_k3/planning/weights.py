"""Bytes of the weights that one rank holds, by module, from the loader's own table of tensors.

Each tensor of models/names.py is shared, or not, as the served model's layers share it; a test holds the sums
against that model, built for one rank of several.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from sglang_k3.models.config import K3Config
from sglang_k3.models.dspark_config import DraftConfig
from sglang_k3.models.names import ExpertShard, Rule, expert_parts, expert_rule, layer_rules, model_rules
from sglang_k3.planning.layout import Layout

KDA, MLA, ROUTER, LATENT = "KDA", "MLA", "router", "latent projections"
EXPERTS, SHARED, DENSE = "routed experts", "shared experts", "dense MLP"
VOCABULARY, NORMS, COPIES, DRAFT = "embedding and head", "norms and mixes", "derived copies", "draft"

ExpertFormat = Literal["checkpoint", "int4", "bfloat16"]
EXPERT_FORMATS: tuple[ExpertFormat, ...] = get_args(ExpertFormat)
_FP32 = torch.float32.itemsize


@dataclass(frozen=True)
class Precision:
    """Dtypes. matrices: bits of one weight of a module's matrices where it is not `dtype`.

    copies: with what the served model derives at start (the router in fp32, MLA's absorbed matrices, the
    residual queries). experts: "checkpoint" as the config says, "int4" with one scale a row (ModelSlim's
    W4A8, an assumption of 8 bytes a row).
    """

    dtype: torch.dtype = torch.bfloat16
    state: torch.dtype = torch.float32
    kv_bytes: int = 2
    experts: ExpertFormat = "checkpoint"
    matrices: Mapping[str, float] = field(default_factory=dict)
    copies: bool = True

    def bits(self, module: str, rule_dtype: torch.dtype | None, dimensions: int) -> float:
        """Bits of one number of a tensor."""
        if rule_dtype is not None:
            return 8 * rule_dtype.itemsize
        return (
            self.matrices.get(module, 8 * self.dtype.itemsize) if dimensions > 1 else 8 * self.dtype.itemsize
        )


@dataclass
class Module:
    """One module over all layers of a rank. size, read: bytes held, and read by a step. products: numbers
    that a row is multiplied with. sharing: ranks that share most of it."""

    name: str
    size: float = 0.0
    read: float = 0.0
    products: float = 0.0
    sharing: int = 1


def weights(config: K3Config, layout: Layout, precision: Precision) -> dict[str, Module]:
    """Every module of one rank. Experts are counted whole: a step reads those that its rows choose."""
    found: dict[str, Module] = {}

    def add(
        module: str, bits: float, count: float, sharing: int, *, layers: int = 1, read: bool = True
    ) -> None:
        entry = found.setdefault(module, Module(module))
        entry.size += layers * bits / 8 * count
        if read:
            entry.read += layers * bits / 8 * count
            entry.products += layers * count
            entry.sharing = max(entry.sharing, sharing)

    for rule in model_rules(config):
        name = rule.name
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            head = name.startswith("lm_head")
            sharing = layout.head if head else layout.embedding
            rows = vocabulary_rows(rule.shape[0], sharing)
            add(
                VOCABULARY,
                precision.bits(VOCABULARY, rule.dtype, 2),
                rows * rule.shape[1],
                sharing,
                read=head,
            )
        else:
            add(NORMS, precision.bits(NORMS, rule.dtype, len(rule.shape)), math.prod(rule.shape), 1)
    for kind, layers in _kinds(config):
        for rule in layer_rules(config, kind):
            module, sharing = _place(rule, config.is_kda(kind), config.is_moe(kind), layout)
            # A step reads what is derived from these two, not themselves.
            read = not (precision.copies and rule.name.endswith(("kv_b_proj.weight", "mlp.gate.weight")))
            add(
                module,
                precision.bits(module, rule.dtype, len(rule.shape)),
                _numbers(rule, config) / sharing,
                sharing,
                layers=layers,
                read=read,
            )
    if config.moe is not None:
        share = layout.experts * layout.expert_rows
        held = config.moe.num_experts * len(config.moe_layers) / share
        entry = Module(EXPERTS, held * expert_bytes(config, precision), sharing=share)
        found[EXPERTS] = entry
    if precision.copies:
        for copied in _copies(config, layout, precision):
            entry = found.setdefault(COPIES, Module(COPIES))
            entry.size += copied.size
            entry.read += copied.read
            entry.products += copied.products
            entry.sharing = max(entry.sharing, copied.sharing)
    return found


def expert_bytes(config: K3Config, precision: Precision) -> float:
    """Bytes of one routed expert, whole."""
    assert config.moe is not None, "the model has no routed experts"
    if precision.experts == "checkpoint":
        return sum(
            math.prod(rule.shape) * (rule.dtype or precision.dtype).itemsize
            for matrix in ("w1", "w2", "w3")
            for part in expert_parts(config)
            for rule in (expert_rule(config, ExpertShard(0, matrix), part),)
        )
    inner, outer = config.moe.intermediate_size, config.expert_size
    numbers, rows = 3 * inner * outer, 2 * inner + outer
    return numbers * 2 if precision.experts == "bfloat16" else numbers / 2 + 8 * rows


def expert_numbers(config: K3Config) -> int:
    """Parameters of one routed expert."""
    assert config.moe is not None, "the model has no routed experts"
    return 3 * config.moe.intermediate_size * config.expert_size


def draft_weights(draft: DraftConfig, layout: Layout, dtype: torch.dtype) -> Module:
    """The draft on one rank, its tables of rotary angles (fp32) included. Embedding and head are the
    target's."""
    numbers = 0.0
    for name, shape in draft.tensor_shapes().items():
        cut = name.endswith(("_proj.weight",)) and name.startswith("layers.")
        numbers += math.prod(shape) / (layout.draft if cut else 1)
    size = numbers * dtype.itemsize
    embedding = draft.vocab_size * draft.markov_rank
    # The head of the Markov chain is read for each drafted token, its embedding by rows.
    read = size + (draft.gamma - 2) * embedding * dtype.itemsize
    angles = draft.max_positions * draft.head_dim * _FP32
    return Module(DRAFT, size + angles, read, numbers, layout.draft)


def vocabulary_rows(size: int, ranks: int) -> int:
    """Rows of a vocabulary table on one rank, as SGLang pads it."""
    from sglang.srt.layers.vocab_parallel_embedding import DEFAULT_VOCAB_PADDING_SIZE, pad_vocab_size

    unit = DEFAULT_VOCAB_PADDING_SIZE
    if pad_vocab_size(size, unit) % ranks:
        unit *= ranks
    return pad_vocab_size(size, unit) // ranks


def _kinds(config: K3Config) -> Iterator[tuple[int, int]]:
    """A layer of each kind, and how many there are of it."""
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for layer in range(config.num_layers):
        kinds.setdefault((config.is_kda(layer), config.is_moe(layer)), []).append(layer)
    return ((layers[0], len(layers)) for layers in kinds.values())


def _numbers(rule: Rule, config: K3Config) -> int:
    """Numbers of the parameter that a tensor fills; A_log is stored with padding."""
    return config.kda.num_heads if rule.name.endswith("A_log") else math.prod(rule.shape)


_KDA_WHOLE = {"f_a_proj", "g_a_proj", "o_norm"}
_MLA_WHOLE = {"q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"}
_MLA_OUTPUT = {"g_proj", "o_proj"}


def _place(rule: Rule, kda: bool, moe: bool, layout: Layout) -> tuple[str, int]:
    """The module of a layer's tensor, and the ranks that share the tensor."""
    section, _, rest = rule.name.partition(".")
    stem = rest.removesuffix(".weight")
    if section == "self_attn" and kda:
        return KDA, 1 if stem in _KDA_WHOLE else layout.attention
    if section == "self_attn":
        if stem in _MLA_WHOLE:
            return MLA, 1
        return MLA, layout.mla_output if stem in _MLA_OUTPUT else layout.mla
    if section != "mlp":
        return NORMS, 1
    if not moe:
        return DENSE, layout.mlp
    if stem.startswith("shared_experts."):
        return SHARED, layout.mlp
    return (ROUTER if stem.startswith("gate") else LATENT), 1


def _copies(config: K3Config, layout: Layout, precision: Precision) -> Iterator[Module]:
    """What the served model derives from its weights at start, and keeps beside them."""
    mla = config.mla
    absorbed = mla.num_heads / layout.mla * (mla.qk_nope_head_dim + mla.v_head_dim) * mla.kv_lora_rank
    numbers = len(config.mla_layers) * absorbed
    size = numbers * precision.dtype.itemsize
    yield Module(COPIES, size, size, numbers, layout.mla)
    if config.moe is not None:
        numbers = len(config.moe_layers) * config.moe.num_experts * config.hidden_size
        # Widening an fp32 weight copies nothing.
        held = 0 if precision.dtype == torch.float32 else numbers * _FP32
        yield Module(COPIES, held, numbers * _FP32, numbers, 1)
    if config.residual_block_size is not None:
        numbers = (2 * config.num_layers + 1) * config.hidden_size
        # Each reader has its query, and all readers of a bank have theirs stacked.
        yield Module(COPIES, 2 * numbers * _FP32, numbers * _FP32, numbers, 1)
