"""The strict loader, and the shard loaders of parameters that SGLang's layers don't cover.

Strict: every tensor of the checkpoint has one place in the model or is on the vision skip list,
every place is filled once, and every shape is checked whole, before it is cut for a rank. Packed
experts stay packed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from sglang_k3.models.config import K3Config
from sglang_k3.models.names import (
    ExpertMatrix,
    ExpertPart,
    ExpertShard,
    Rule,
    canonical,
    expected_names,
    expert_parts,
    expert_rule,
    is_vision,
    layer_rules,
    model_rules,
)

_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(w[123])\.(weight|weight_packed|weight_scale)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_NAMES_SHOWN = 5


class CheckpointError(RuntimeError):
    """A checkpoint that doesn't fit its config; the message names the tensors and the remedy."""


@dataclass(frozen=True)
class LoadReport:
    """What one rank loaded. Tensors and bytes are the checkpoint's, before sharding."""

    tensors: int
    bytes: int
    parameters: int
    vision_skipped: int


class Placement:
    """Where each tensor of a config's checkpoint goes."""

    def __init__(self, config: K3Config) -> None:
        self.config = config
        self._model = {rule.name: rule for rule in model_rules(config)}
        # Layers of one kind have the same rules: two kinds of attention, two of MLP.
        kinds: dict[tuple[bool, bool], dict[str, Rule]] = {}
        self._layers: list[dict[str, Rule]] = []
        for layer in range(config.num_layers):
            kind = (config.is_kda(layer), config.is_moe(layer))
            if kind not in kinds:
                kinds[kind] = {rule.name: rule for rule in layer_rules(config, layer)}
            self._layers.append(kinds[kind])

    def find(self, name: str) -> tuple[str, Rule]:
        """The full name of the parameter that a checkpoint tensor fills, and its rule.

        Raises CheckpointError for a tensor that the config doesn't ask for.
        """
        within = canonical(name)
        in_layer = _LAYER.fullmatch(within)
        if in_layer is None:
            rule = self._model.get(within)
            if rule is None:
                raise CheckpointError(f"{name}: unknown tensor. {self._hint(None, within)}")
            return rule.parameter, rule
        layer, rest = int(in_layer[1]), in_layer[2]
        rule = self._in_layer(layer, rest)
        if rule is None:
            raise CheckpointError(f"{name}: unknown tensor. {self._hint(layer, rest)}")
        return f"model.layers.{layer}.{rule.parameter}", rule

    def _in_layer(self, layer: int, rest: str) -> Rule | None:
        config = self.config
        if layer >= config.num_layers:
            return None
        expert = _EXPERT.fullmatch(rest)
        if expert is None:
            return self._layers[layer].get(rest)
        number = int(expert[1])
        matrix, part = cast(ExpertMatrix, expert[2]), cast(ExpertPart, expert[3])
        if config.moe is None or not config.is_moe(layer) or number >= config.moe.num_experts:
            return None
        if part not in expert_parts(config):
            return None
        return expert_rule(config, ExpertShard(number, matrix), part)

    def _hint(self, layer: int | None, rest: str) -> str:
        config = self.config
        if layer is not None and layer >= config.num_layers:
            return f"The config has num_hidden_layers={config.num_layers}: correct it or the checkpoint"
        expert = _EXPERT.fullmatch(rest)
        if expert is None or config.moe is None or layer not in config.moe_layers:
            return "The config asks for no such tensor: check config.json against the checkpoint"
        if int(expert[1]) >= config.moe.num_experts:
            return f"The config has num_experts={config.moe.num_experts}: correct it or the checkpoint"
        if config.moe.packed:
            return "The config says the experts are MXFP4: remove quantization_config for plain weights"
        return "The config says the experts are plain: add the mxfp4-pack-quantized quantization_config"


def load(
    model: nn.Module,
    config: K3Config,
    tensors: Iterable[tuple[str, torch.Tensor]],
    tp_rank: int = 0,
    tp_size: int = 1,
) -> LoadReport:
    """Fill the model's parameters from (checkpoint name, whole tensor) pairs.

    Each parameter's own `weight_loader(parameter, tensor[, shard])` cuts its part; one without is
    copied whole. tp_rank and tp_size only say in an error message which process it comes from.

    Raises CheckpointError for a tensor that is unknown, misshapen, of the wrong kind of dtype or
    there twice, for one that is missing, and for a parameter that nothing fills.
    """
    try:
        return _load(model, config, tensors)
    except CheckpointError as error:
        if tp_size == 1:
            raise
        raise CheckpointError(f"rank {tp_rank} of {tp_size}: {error}") from error


def load_a_log(num_heads: int, tp_rank: int, tp_size: int) -> Callable[..., None]:
    """Loader of A_log [num_heads / tp]: drops the padding behind the heads, then cuts the rank's.

    Takes [num_heads or more], K3's padded form, or [1, 1, num_heads, 1].
    """

    def loader(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        _copy(parameter, _cut(tensor.flatten()[:num_heads], 0, tp_rank, tp_size))

    return loader


def load_sharded_vector(tp_rank: int, tp_size: int) -> Callable[..., None]:
    """Loader of a parameter [n / tp, ...] that is cut along its first axis."""

    def loader(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        _copy(parameter, _cut(tensor, 0, tp_rank, tp_size))

    return loader


def load_conv(tp_rank: int, tp_size: int) -> Callable[..., None]:
    """Loader of the short convolution [3 * C / tp, W], from q, k, v as shards 0, 1, 2 of [C, 1, W].

    Each third is cut by itself, so a rank holds the channels of its own heads, q | k | v.
    """

    def loader(parameter: nn.Parameter, tensor: torch.Tensor, shard: int) -> None:
        third = parameter.data.unflatten(0, (3, -1))[shard]
        _copy(third, _cut(tensor.squeeze(1), 0, tp_rank, tp_size))

    return loader


def load_experts(first: int, count: int, tp_rank: int, tp_size: int) -> Callable[..., None]:
    """Loader of stacked expert matrices: w13 [count, 2 * I / tp, D] or w2 [count, D, I / tp].

    The rank owns experts first..first + count - 1; the others are passed over. The same loader
    serves dense weights, packed codes [.., /2] and scales [.., /32]: tensor-parallel ranks share
    the rows of w1 (first half of w13) and w3 (second half), and the columns of w2.
    """

    def loader(parameter: nn.Parameter, tensor: torch.Tensor, shard: ExpertShard) -> None:
        if not first <= shard.expert < first + count:
            return
        own = parameter.data[shard.expert - first]
        if shard.matrix == "w2":
            _copy(own, _cut(tensor, 1, tp_rank, tp_size))
        else:
            half = own.unflatten(0, (2, -1))[0 if shard.matrix == "w1" else 1]
            _copy(half, _cut(tensor, 0, tp_rank, tp_size))

    return loader


def _load(model: nn.Module, config: K3Config, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadReport:
    placement = Placement(config)
    parameters = dict(model.named_parameters())
    seen: set[str] = set()
    filled: set[str] = set()
    size = skipped = 0
    for name, tensor in tensors:
        if is_vision(name):
            skipped += 1
            continue
        target, rule = placement.find(name)
        _check(name, tensor, rule, config)
        if canonical(name) in seen:
            raise CheckpointError(f"{name} is in the checkpoint twice: remove one of the copies")
        if target not in parameters:
            raise CheckpointError(f"{name}: the model has no parameter {target} to put it in")
        _fill(name, parameters[target], tensor, rule.shard)
        seen.add(canonical(name))
        filled.add(target)
        size += tensor.nbytes
    missing = (
        spec.name
        for spec in expected_names(config)
        if not is_vision(spec.name) and canonical(spec.name) not in seen
    )
    _refuse(missing, "the checkpoint lacks", "download it again, or correct config.json")
    _refuse(
        (name for name in parameters if name not in filled),
        "no checkpoint tensor fills",
        "the model was built for another config than its checkpoint's",
    )
    return LoadReport(len(seen), size, len(filled), skipped)


def _check(name: str, tensor: torch.Tensor, rule: Rule, config: K3Config) -> None:
    shape = tuple(tensor.shape)
    fits = shape == rule.shape
    if rule.parameter == "self_attn.A_log":
        heads = config.kda.num_heads
        fits = shape == (1, 1, heads, 1) or (len(shape) == 1 and shape[0] >= heads)
    if not fits:
        raise CheckpointError(
            f"{name} has shape {list(shape)}, the config asks for {list(rule.shape)}: "
            "correct the sizes in config.json or use the checkpoint it belongs to"
        )
    if tensor.is_floating_point() != (rule.dtype is not torch.uint8):
        wanted = "uint8" if rule.dtype is torch.uint8 else "floating point"
        raise CheckpointError(
            f"{name} is {tensor.dtype}, the config asks for {wanted}: check quantization_config"
        )


def _fill(name: str, parameter: nn.Parameter, tensor: torch.Tensor, shard: int | ExpertShard | None) -> None:
    loader: Callable[..., None] = getattr(parameter, "weight_loader", _copy)
    try:
        if shard is None:
            loader(parameter, tensor)
        else:
            loader(parameter, tensor, shard)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{name} {list(tensor.shape)} does not fit this rank's parameter "
            f"{list(parameter.shape)} ({error}): check that --tp-size divides its heads and widths"
        ) from error


def _refuse(names: Iterable[str], what: str, remedy: str) -> None:
    names = list(names)
    if names:
        shown = ", ".join(names[:_NAMES_SHOWN])
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        raise CheckpointError(f"{what} {shown}{more}: {remedy}")


def _cut(tensor: torch.Tensor, axis: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    size, rest = divmod(tensor.shape[axis], tp_size)
    if rest:
        raise ValueError(f"{tensor.shape[axis]} can't be shared by {tp_size} ranks")
    return tensor.narrow(axis, tp_rank * size, size)


def _copy(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    # Broadcasting would hide a wrong shape.
    if parameter.shape != tensor.shape:
        raise ValueError(f"{list(tensor.shape)} into {list(parameter.shape)}")
    parameter.data.copy_(tensor)
