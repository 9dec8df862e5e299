"""A module with the served model's parameter names and loaders, and nothing else.

SGLang's parallel layers cut their weights themselves, so those are whole here; the parameters with
loaders of ours (KDA's vectors and convolution, experts) have the size of their rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from sglang_k3.models.config import K3Config
from sglang_k3.models.names import ExpertShard, Rule, expert_parts, expert_rule, layer_rules, model_rules
from sglang_k3.models.weights import load_a_log, load_conv, load_experts, load_sharded_vector


class Skeleton(nn.Module):
    """Parameters start as NaN (255 where they are bytes), so that an unfilled one is seen."""

    def __init__(
        self,
        config: K3Config,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        ep_rank: int = 0,
        ep_size: int = 1,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self.rank = (tp_rank, tp_size)
        self.device = device
        self._add("", model_rules(config))
        for layer in range(config.num_layers):
            at = f"model.layers.{layer}."
            self._add(at, layer_rules(config, layer), config.kda.num_heads)
            if config.is_moe(layer):
                self._add_experts(f"{at}", config, ep_rank, ep_size)

    def _add(self, at: str, rules: Iterable[Rule], num_heads: int = 0) -> None:
        shards: dict[str, list[Rule]] = {}
        for rule in rules:
            shards.setdefault(rule.parameter, []).append(rule)
        tp_rank, tp_size = self.rank
        for parameter, group in shards.items():
            rows, rest = group[0].shape[0], group[0].shape[1:]
            last = parameter.rpartition(".")[2]
            loaders = {
                "conv_weight": ((3 * rows // tp_size, *rest[1:]), load_conv(tp_rank, tp_size)),
                "A_log": ((num_heads // tp_size,), load_a_log(num_heads, tp_rank, tp_size)),
                "dt_bias": ((rows // tp_size,), load_sharded_vector(tp_rank, tp_size)),
            }
            if last in loaders:
                shape, loader = loaders[last]
            elif len(group) > 1:
                heights = [rule.shape[0] for rule in sorted(group, key=lambda rule: rule.shard)]  # type: ignore[arg-type, return-value]
                shape, loader = (sum(heights), *rest), _merged(heights)
            else:
                shape, loader = group[0].shape, None
            self._register(at + parameter, shape, torch.float32, loader)

    def _add_experts(self, at: str, config: K3Config, ep_rank: int, ep_size: int) -> None:
        assert config.moe is not None
        count = config.moe.num_experts // ep_size
        loader = load_experts(ep_rank * count, count, *self.rank)
        for part in expert_parts(config):
            for matrix in ("w1", "w2"):
                rule = expert_rule(config, ExpertShard(0, matrix), part)
                rows, columns = rule.shape
                if matrix == "w1":
                    rows = 2 * rows // self.rank[1]
                else:
                    columns //= self.rank[1]
                self._register(
                    at + rule.parameter, (count, rows, columns), rule.dtype or torch.float32, loader
                )

    def _register(self, name: str, shape, dtype: torch.dtype, loader) -> None:
        fill = 255 if dtype is torch.uint8 else float("nan")
        parameter = nn.Parameter(
            torch.full(shape, fill, dtype=dtype, device=self.device), requires_grad=False
        )
        if loader is not None:
            parameter.weight_loader = loader  # type: ignore[attr-defined]
        *path, last = name.split(".")
        module: nn.Module = self
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(last, parameter)


def _merged(heights: list[int]):
    def loader(parameter: nn.Parameter, tensor: torch.Tensor, shard: int) -> None:
        parameter.data.split(heights)[shard].copy_(tensor)

    return loader
