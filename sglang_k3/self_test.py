"""A few seconds of arithmetic: every CPU implementation of the central operators against its oracle.

Not a test suite: it answers whether this machine, its compiler cache and its installed torch and numba
compute what they should, on inputs small enough to start a server after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sglang_k3.kernels import registry

TOLERANCE = 1e-4
"""Largest difference allowed, in fp32, where results are of order 1. Order of sums alone gives 1e-6."""

_HEADS, _KEY, _VALUE, _SLOTS = 4, 64, 48, 6


@dataclass(frozen=True)
class Outcome:
    """One implementation's largest deviation from the oracle, in its results and in the pools it wrote."""

    operator: str
    implementation: str
    error: float
    failure: str | None = None

    @property
    def ok(self) -> bool:
        # A NaN is not below anything.
        return self.failure is None and self.error <= TOLERANCE


def _lengths() -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds and slots of three requests, of 1, 70 and 5 tokens (more than one prefill chunk)."""
    return torch.tensor([0, 1, 71, 76]), torch.tensor([2, 4, 1])


def _kda(tokens: int) -> tuple[torch.Tensor, ...]:
    q, k = torch.randn(2, tokens, _HEADS, _KEY)
    v = torch.randn(tokens, _HEADS, _VALUE)
    g = -5.0 * torch.sigmoid(torch.randn(tokens, _HEADS, _KEY) - 2.0)
    return q, k, v, g, torch.sigmoid(torch.randn(tokens, _HEADS)), torch.randn(_SLOTS, _HEADS, _VALUE, _KEY)


def _kda_decode() -> tuple[Any, ...]:
    slots = _lengths()[1]
    return *_kda(len(slots)), slots, _KEY**-0.5


def _prefill() -> tuple[torch.Tensor, ...]:
    """slots, cu_seqlens, fresh, track_offsets and track_slots, as the prefill operators take them."""
    bounds, slots = _lengths()
    fresh = torch.tensor([False, True, False])
    return slots, bounds, fresh, torch.tensor([-1, 64, -1]), torch.tensor([-1, 5, -1])


def _kda_extend() -> tuple[Any, ...]:
    return *_kda(76), *_prefill(), _KEY**-0.5


def _conv(tokens: int) -> tuple[torch.Tensor, ...]:
    channels, width = 96, 4
    return (
        torch.randn(tokens, channels),
        0.5 * torch.randn(channels, width),
        torch.randn(_SLOTS, width - 1, channels),
    )


def _conv_decode() -> tuple[Any, ...]:
    slots = _lengths()[1]
    return *_conv(len(slots)), slots


def _conv_extend() -> tuple[Any, ...]:
    return *_conv(76), *_prefill()


def _mla() -> tuple[Any, ...]:
    latent, rope = 64, 16
    bounds, _ = _lengths()
    prefix = torch.tensor([40, 0, 130])
    positions = 140
    table = torch.randperm(3 * positions).view(3, positions)
    q = torch.randn(76, _HEADS, latent + rope)
    cache = torch.randn(3 * positions, latent + rope)
    return q, cache, table, torch.tensor([1, 0, 2]), bounds, prefix, (latent + rope) ** -0.5, latent


def _experts() -> tuple[Any, ...]:
    experts, width, hidden, chosen, tokens = 12, 64, 96, 4, 9
    ids = torch.stack([torch.randperm(experts)[:chosen].sort().values for _ in range(tokens)])
    weights = torch.softmax(torch.randn(tokens, chosen), dim=-1)
    w13 = torch.randn(experts, 2 * hidden, width) * width**-0.5
    w2 = torch.randn(experts, width, hidden) * hidden**-0.5
    return torch.randn(tokens, width), ids, weights, w13, w2, 4.0, 25.0


CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "kda.decode": _kda_decode,
    "kda.extend": _kda_extend,
    "short_conv.decode": _conv_decode,
    "short_conv.extend": _conv_extend,
    "mla.paged_attention": _mla,
    "moe.experts": _experts,
}


def _tensors(
    implementation: registry.Implementation, case: Callable[[], tuple[Any, ...]]
) -> list[torch.Tensor]:
    """The result and every floating-point argument after the call, pools included, on the case's inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        arguments = case()
    result = implementation.function(*arguments)
    return [result, *(a for a in arguments if isinstance(a, torch.Tensor) and a.is_floating_point())]


def _measure(operator: str, implementation: registry.Implementation, expected: list[torch.Tensor]) -> Outcome:
    try:
        actual = _tensors(implementation, CASES[operator])
        # torch.max keeps a NaN where Python's max would drop it.
        worst = torch.stack(
            [(a - e).abs().max().float() for a, e in zip(actual, expected, strict=True)]
        ).max()
        return Outcome(operator, implementation.name, float(worst))
    except Exception as error:
        return Outcome(operator, implementation.name, float("nan"), f"{type(error).__name__}: {error}")


def run() -> Iterator[Outcome]:
    """Each implementation that runs on a CPU in fp32, of each operator in CASES, against "reference"."""
    call = registry.Call("cpu", torch.float32)
    for operator, case in CASES.items():
        entries = registry.implementations(operator)
        (oracle,) = (entry for entry in entries if entry.name == "reference")
        expected = _tensors(oracle, case)
        for entry in entries:
            if entry is not oracle and entry.refusal(call) is None:
                yield _measure(operator, entry, expected)
