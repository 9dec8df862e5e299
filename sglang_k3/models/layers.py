"""Small building blocks: norms, plain weights, and linear layers that run on our kernels."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import ColumnParallelLinear, LinearBase, ReplicatedLinear
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from torch import nn

from sglang_k3.kernels.registry import choose
from sglang_k3.models.runtime import kernel_call


def weight(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """An inference parameter, filled by the loader."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Weight(nn.Module):
    """One tensor under the name `<module>.weight`."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = weight(*shape)


class RMSNorm(Weight):
    """x [T, D] -> [T, D]: squares in fp32, cast to x's dtype, times the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width)
        self.eps = eps
        self.norm = choose("rms_norm", kernel_call())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x, self.weight, self.eps)


class K3LinearMethod(UnquantizedLinearMethod):
    """SGLang's unquantised linear, computed by the kernel the registry chose (exact or fast)."""

    def __init__(self) -> None:
        self.linear = choose("linear", kernel_call())

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert bias is None, "the text model has no biases on its linear layers"
        return self.linear(x, layer.weight)

    def embedding(self, layer: Any, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, layer.weight)


class K3LinearConfig(QuantizationConfig):
    """Hands K3LinearMethod to every linear layer of the model, lm_head included.

    SGLang's layers take their arithmetic from a quantisation config, so this is how ours gets in. It
    quantises nothing; packed experts are a module of their own.
    """

    def get_name(self) -> str:
        return "sglang_k3"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> K3LinearConfig:
        return cls()

    def get_scaled_act_names(self) -> list[str]:
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return K3LinearMethod() if isinstance(layer, (LinearBase, ParallelLMHead)) else None


def attention_column(
    name: str, inputs: int, outputs: int, *, quant_config: QuantizationConfig, prefix: str
) -> ColumnParallelLinear:
    """An attention projection whose outputs (heads) are shared by the attention ranks."""
    return ColumnParallelLinear(
        inputs,
        outputs,
        bias=False,
        quant_config=quant_config,
        parallel_group="attn_tp",
        prefix=f"{prefix}.{name}",
    )


def attention_replicated(
    inputs: int, name: str, outputs: int, *, quant_config: QuantizationConfig, prefix: str
) -> ReplicatedLinear:
    """An attention projection that every rank holds whole."""
    return ReplicatedLinear(inputs, outputs, bias=False, quant_config=quant_config, prefix=f"{prefix}.{name}")
