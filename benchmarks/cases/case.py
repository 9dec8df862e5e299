"""What one line of the table is: an operator at one shape, with its arguments and what they cost at least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.rotation import Arguments
from sglang_k3.models.presets import real_k3_config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ELEMENT = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Sizes:
    """Widths of the model and how much of it a case takes. The defaults are Kimi K3's."""

    hidden: int
    heads: int
    head_dim: int
    conv_width: int
    q_lora: int
    latent: int
    rope: int
    nope: int
    experts: int
    top_k: int
    expert_inner: int
    expert_width: int
    shared_inner: int
    bank: int
    readers: int
    situ_beta: float
    situ_linear_beta: float
    eps: float
    gate_bound: float
    requests: int = 4
    rows: int = 1024
    prefill_heads: int = 32
    prefill_tokens: int = 4096
    peer_tokens: int = 1024
    context: int = 4096
    extend_prefix: int = 1024
    extend_rows: int = 64
    linear_rows: int = 256
    held_experts: int = 64

    @staticmethod
    def full() -> Sizes:
        """The published config; sizes that it does not fix are this module's."""
        config = real_k3_config()["text_config"]
        kda = config["linear_attn_config"]
        block = config["attn_res_block_size"]
        return Sizes(
            hidden=config["hidden_size"],
            heads=kda["num_heads"],
            head_dim=kda["head_dim"],
            conv_width=kda["short_conv_kernel_size"],
            q_lora=config["q_lora_rank"],
            latent=config["kv_lora_rank"],
            rope=config["qk_rope_head_dim"],
            nope=config["qk_nope_head_dim"],
            experts=config["num_experts"],
            top_k=config["num_experts_per_token"],
            expert_inner=config["moe_intermediate_size"],
            expert_width=config["routed_expert_hidden_size"],
            shared_inner=config["num_shared_experts"] * config["moe_intermediate_size"],
            bank=config["num_hidden_layers"] // block + 1,
            readers=2 * block,
            situ_beta=config["activation_situ_beta"],
            situ_linear_beta=config["activation_situ_linear_beta"],
            eps=config["rms_norm_eps"],
            gate_bound=kda["gate_lower_bound"],
        )

    @staticmethod
    def quick() -> Sizes:
        """Everything small: shows that the benchmark works, says nothing about speed."""
        return Sizes(
            hidden=256,
            heads=4,
            head_dim=32,
            conv_width=4,
            q_lora=64,
            latent=64,
            rope=32,
            nope=32,
            experts=64,
            top_k=4,
            expert_inner=96,
            expert_width=128,
            shared_inner=192,
            bank=3,
            readers=4,
            situ_beta=4.0,
            situ_linear_beta=25.0,
            eps=1e-5,
            gate_bound=-5.0,
            requests=2,
            rows=32,
            prefill_heads=2,
            prefill_tokens=256,
            peer_tokens=64,
            context=96,
            extend_prefix=48,
            extend_rows=8,
            linear_rows=24,
            held_experts=8,
        )


@dataclass(frozen=True)
class PeerRun:
    """Another way to the same result: make() gives its arguments and which of them are cold.

    rounds: for a slow one, how many of the rounds it takes part in.
    """

    name: str
    dtype: str
    function: Callable[..., object]
    make: Callable[[], tuple[Arguments, Sequence[int]]]
    rounds: int | None = None


@dataclass(frozen=True)
class Case:
    """One operator at one shape.

    operator: registry key. traffic: the memory probe that moves bytes as the operator does. cold: indices of
    the arguments that must not be found in a cache. expand: see `rotation`. note: what was cut, and what else
    a reader must know.
    """

    name: str
    operator: str
    dtype: str
    shape: dict[str, int]
    traffic: str
    bytes_moved: int
    flops: int
    make: Callable[[], Arguments]
    cold: tuple[int, ...]
    modes: tuple[str, ...] = ("fast", "exact")
    expand: Callable[[Arguments], Sequence[Arguments]] = lambda arguments: [arguments]
    peers: tuple[PeerRun, ...] = ()
    note: str = ""


class Draw:
    """Random arguments, the same in every run. Large ones repeat a million drawn numbers."""

    _DRAWN = 1 << 20

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: str = "fp32", scale: float = 1.0) -> torch.Tensor:
        count = torch.Size(shape).numel()
        drawn = torch.randn(min(count, self._DRAWN), generator=self._generator) * scale
        return self._fill(drawn.to(DTYPES[dtype]), shape, count)

    def bytes(self, *shape: int) -> torch.Tensor:
        """Uniform uint8."""
        count = torch.Size(shape).numel()
        drawn = torch.randint(256, (min(count, self._DRAWN),), generator=self._generator, dtype=torch.uint8)
        return self._fill(drawn, shape, count)

    def order(self, count: int) -> torch.Tensor:
        """A random order of 0 .. count - 1, int64."""
        return torch.randperm(count, generator=self._generator)

    def _fill(self, drawn: torch.Tensor, shape: tuple[int, ...], count: int) -> torch.Tensor:
        repeats = -(-count // max(1, drawn.numel()))
        return drawn.repeat(repeats)[:count].view(shape)
