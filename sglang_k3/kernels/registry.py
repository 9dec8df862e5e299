"""One registry: operator -> implementations, each of which accepts a call or says why it can't.

A caller asks once, when it is built, never on the hot path:

    decode = registry.choose("kda.decode", Call(device="cpu", dtype=torch.float32, exact=True))
    out = decode(q, k, v, g, beta, state, slots, scale)

The choice and every refusal before it is logged once per process and shown by `sglang-k3 doctor`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from sglang_k3.kernels import order

logger = logging.getLogger(__name__)

# Every module that registers implementations. A new device adds its modules here (an installed
# CANN or flashinfer-ascend package would be one more line).
_MODULES = tuple(
    f"sglang_k3.kernels.{operator}.{file}"
    for operator in (
        "linear",
        "rms_norm",
        "short_conv",
        "kda",
        "gated_rms_norm",
        "attention_residual",
        "activation",
        "output_gate",
        "mx",
        "mla",
        "moe",
        "block_attention",
    )
    for file in ("reference", "cpu")
) + tuple(
    f"sglang_k3.kernels.{path}"
    for path in (
        "rotary.reference",
        "linear.ascend",
        "rms_norm.ascend",
        "rotary.ascend",
        "short_conv.ascend",
        "short_conv.ascend_fused",
        "kda.ascend",
        "kda.ascend_chunk",
        "kda.ascend_fused",
        "gated_rms_norm.ascend",
        "attention_residual.ascend",
        "activation.ascend",
        "output_gate.ascend",
        "mla.ascend",
        "mla.ascend_fused",
        "moe.ascend",
        "moe.ascend_mx",
        "block_attention.ascend",
        "acceptance.reference",
    )
)
# Our Triton kernels: files of launches, which import Triton when they are called.
_MODULES += tuple(
    f"sglang_k3.kernels.{path}"
    for path in (
        "kda.ascend_triton",
        "kda.ascend_triton_block",
        "kda.ascend_triton_chunk",
        "short_conv.ascend_triton",
        "gated_rms_norm.ascend_triton",
        "activation.ascend_triton",
        "attention_residual.ascend_triton",
        "acceptance.ascend_triton",
        "mla.ascend_triton",
    )
)


@dataclass(frozen=True)
class Call:
    """What an operator will be asked to do.

    `exact` asks for batch-invariant arithmetic: a row's bits do not depend on the other rows, on
    the chunking, or on the phase (design: exact mode). `dims` holds sizes an implementation may
    refuse, such as {"K": 128, "V": 128}.
    """

    device: str
    dtype: torch.dtype
    exact: bool = False
    dims: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator. `exact` says whether its rows are batch-invariant.

    `host` names what it has to know on the host, which makes a step on a device wait once for a copy; empty
    for none. `composed`: it runs the operator's parts after one another, and saves nothing over them.
    """

    operator: str
    name: str
    function: Callable
    preference: int
    exact: bool
    device: str
    supports: Callable[[Call], str | None]
    host: str = ""
    composed: bool = False

    def refusal(self, call: Call) -> str | None:
        """None when the call can be taken, else the reason it can't."""
        if self.device not in ("any", call.device):
            return f"runs on {self.device}, not on {call.device}"
        if call.exact and not self.exact:
            return "its rows are not batch-invariant (exact mode)"
        return self.supports(call)


class NoImplementation(RuntimeError):
    """No registered implementation takes a call; the message lists each refusal."""


_implementations: dict[str, list[Implementation]] = {}
_choices: dict[tuple, tuple[Implementation, tuple[tuple[str, str], ...]]] = {}


def register(
    operator: str,
    name: str,
    *,
    preference: int,
    exact: bool = False,
    device: str = "cpu",
    supports: Callable[[Call], str | None] = lambda call: None,
    host: str = "",
    composed: bool = False,
):
    """Decorator. Higher `preference` is asked first; the reference registers with 0, device "any"."""

    def add(function: Callable) -> Callable:
        entries = _implementations.setdefault(operator, [])
        if any(e.name == name for e in entries):
            raise ValueError(f"{operator} already has an implementation named {name!r}")
        entries.append(
            Implementation(operator, name, function, preference, exact, device, supports, host, composed)
        )
        entries.sort(key=lambda e: -e.preference)
        return function

    return add


def load() -> None:
    """Import every module that registers implementations (idempotent)."""
    for module in _MODULES:
        importlib.import_module(module)


def implementations(operator: str) -> list[Implementation]:
    """All implementations of an operator in the order in which they are asked. Raises KeyError for an unknown
    one, ValueError for a wrong SGLANG_K3_KERNELS."""
    load()
    if operator not in _implementations:
        raise KeyError(f"unknown operator {operator!r}; known: {', '.join(operators())}")
    first = order.first()
    return sorted(_implementations[operator], key=lambda entry: entry.name != first)


def operators() -> list[str]:
    load()
    return sorted(_implementations)


def resolve(operator: str, call: Call) -> tuple[Implementation, tuple[tuple[str, str], ...]]:
    """The implementation that takes the call, and the (name, reason) of each refusal before it."""
    first = order.first()
    key = (operator, call.device, call.dtype, call.exact, tuple(sorted(call.dims.items())), first)
    if key not in _choices:
        refused: list[tuple[str, str]] = []
        for entry in implementations(operator):
            reason = entry.refusal(call)
            if reason is None:
                _choices[key] = (entry, tuple(refused))
                because = "; ".join(f"{n}: {r}" for n, r in refused)
                # Somebody asked for it by name, and does not get it.
                level = logging.WARNING if first in dict(refused) else logging.INFO
                logger.log(
                    level, "%s -> %s%s", operator, entry.name, f" (refused {because})" if because else ""
                )
                break
            refused.append((entry.name, reason))
        else:
            raise NoImplementation(
                f"no implementation of {operator} takes {call}: " + "; ".join(f"{n}: {r}" for n, r in refused)
            )
    return _choices[key]


def choose(operator: str, call: Call) -> Callable:
    """The function that implements `operator` for `call`. Raises NoImplementation."""
    return resolve(operator, call)[0].function


def choose_fused(operator: str, call: Call) -> Callable | None:
    """As `choose`, but None where what takes the call is composed: its parts, chosen each for itself, do."""
    choice = resolve(operator, call)[0]
    return None if choice.composed else choice.function
