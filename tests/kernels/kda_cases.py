"""Inputs and short-hands of the KDA tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_k3.kernels.kda import cpu, reference
from tests.kernels.invariance import torch_threads
from tests.kernels.spans import Spans, spans

EXTENDS = {"reference": reference.extend, "recurrent": cpu.extend_recurrent, "chunk": cpu.extend_chunk}
DECODES = {"reference": reference.decode, "numba": cpu.decode}


@dataclass(frozen=True)
class KDAInputs:
    """q, k [T, H, K], v [T, H, V], g [T, H, K] log decay, beta [T, H]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> KDAInputs:
        return KDAInputs(*map(change, self.tensors))

    def rows(self, begin: int, end: int) -> KDAInputs:
        return self.map(lambda x: x[begin:end])


def kda_inputs(
    tokens: int,
    heads: int = 2,
    key_dim: int = 32,
    value_dim: int = 24,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> KDAInputs:
    """Random inputs; gates spread over the safe gate's whole range (-5, 0)."""
    r = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=r)

    return KDAInputs(
        q=normal(tokens, heads, key_dim).to(dtype),
        k=normal(tokens, heads, key_dim).to(dtype),
        v=normal(tokens, heads, value_dim).to(dtype),
        g=-5 * (3 * normal(tokens, heads, key_dim) - 2).sigmoid(),
        beta=normal(tokens, heads).sigmoid(),
    )


def states(
    inputs: KDAInputs, count: int, *, seed: int = 99, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A pool [count, H, V, K] of random states that fit the inputs."""
    r = torch.Generator().manual_seed(seed)
    heads, value_dim, key_dim = *inputs.v.shape[1:], inputs.k.shape[2]
    return torch.randn(count, heads, value_dim, key_dim, generator=r).to(dtype)


def extend(function: Callable, inputs: KDAInputs, pool: torch.Tensor, batch: Spans) -> torch.Tensor:
    return function(*inputs.tensors, pool, *batch.arguments, inputs.scale)


def decode(function: Callable, inputs: KDAInputs, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return function(*inputs.tensors, pool, slots, inputs.scale)


def token_by_token(inputs: KDAInputs, pool: torch.Tensor, slot: int) -> torch.Tensor:
    """o [T, H, V] of one request decoded a token at a time."""
    slots = torch.tensor([slot])
    tokens = inputs.q.shape[0]
    return torch.cat([decode(cpu.decode, inputs.rows(t, t + 1), pool, slots) for t in range(tokens)])


def oracle(inputs: KDAInputs, pool: torch.Tensor, batch: Spans) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the pool afterwards, in fp64. (One thread: its tensors are too small to share out.)"""
    exact_pool = pool.double()
    with torch_threads(1):
        return extend(reference.extend, inputs.map(torch.Tensor.double), exact_pool, batch), exact_pool


def one(tokens: int, *, fresh: bool = False) -> Spans:
    """One request in slot 1."""
    return spans([tokens], fresh=[fresh])
