"""What the Ascend implementations share: which chip this is, and rows that nobody asked for.

Everything here runs on tensors of the device and never asks the host for a value: a look at one would
make the host wait for all that was launched.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch

DEVICE = "npu"


@cache
def operators() -> Any:
    """torch.ops.npu, with torch_npu loaded. Raises ImportError where it is not installed."""
    importlib.import_module("torch_npu")
    return torch.ops.npu


@cache
def package_operator(package: str, namespace: str, name: str) -> Any | None:
    """torch.ops.NAMESPACE.NAME as an installed package registers it; None without the package or in one that
    has no such operator."""
    try:
        importlib.import_module(package)
    except ImportError:
        return None
    return getattr(getattr(torch.ops, namespace), name, None)


@cache
def package_function(module: str, name: str) -> Any | None:
    """A Python function of an installed package; None without the package or in one that has none."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def absent(package: str, operator: str) -> str:
    """The reason of an implementation whose package is not there."""
    return f"{operator} comes with {package}, which is not installed or has none"


@cache
def chip() -> str:
    """The SoC's name as CANN reports it, such as Ascend950PR_9579; "" without a device."""
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return ""
    return str(npu.get_device_name(0))


def has_mx(name: str | None = None) -> bool:
    """Whether the chip computes MX formats: the 950 series does, A2 and A3 (Ascend 910) do not."""
    return (chip() if name is None else name).startswith("Ascend950")


def mx_refusal(form: str) -> str | None:
    """Why this chip takes no such MX format, by name."""
    return (
        None if has_mx() else f"{form} is a format of the Ascend 950 series, and this is {chip() or 'no NPU'}"
    )


def present(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """slots [N] int64, -1 for none -> (kept [N] bool, places [N] int64 that may be indexed with).

    A missing slot is pointed at slot 0, which SGLang's pools leave to padding; `put` writes back there
    what it holds.
    """
    return slots >= 0, slots.clamp(min=0)


def put(pool: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """pool[slots] = values, where slots [N] are >= 0; pool [S, ...], values [N, ...] in the pool's dtype."""
    kept, places = present(slots)
    mask = kept.view(-1, *[1] * (values.dim() - 1))
    pool[places] = torch.where(mask, values, pool[places])


def request_of_row(cu_seqlens: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each of `rows` packed rows: its request [T], its place in it [T], and whether it is padding [T].

    cu_seqlens [N + 1] int64, N >= 1.
    """
    row = torch.arange(rows, device=cu_seqlens.device)
    request = torch.searchsorted(cu_seqlens[1:], row, right=True)
    padding = request >= len(cu_seqlens) - 1
    request = request.clamp(max=len(cu_seqlens) - 2)
    return request, row - cu_seqlens[request], padding
