"""What our Triton kernels are built for: cores, on-chip memory, and the launches that follow from them.

A kernel is started once a core and walks over its items in strides, because CANN takes at most 65,535
programs, and because a program that outlives its first item overlaps its loads with its work.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sglang_k3.kernels import order
from sglang_k3.kernels.ascend import chip
from sglang_k3.kernels.registry import Call

NAME = order.TRITON
PREFERENCE = 5
"""Below the torch forms (10), until somebody has run these on hardware; SGLANG_K3_KERNELS puts them first."""

MAX_PROGRAMS = 65_535
"""The most programs that CANN starts at once, over all three axes."""


@dataclass(frozen=True)
class Target:
    """A chip as the compiler knows it.

    on_chip: bytes of a vector core's unified buffer. bandwidth: GB/s of its memory as announced, for
    expected times. value_rows: rows of a KDA state [V, K = 128] that a core holds at a time, chosen so that
    the buffers of a launch fit twice (the next item's load runs beside this item's work); the compile check
    of tests/kernels/triton holds it to that.
    """

    name: str
    soc: str
    vector_cores: int
    on_chip: int
    bandwidth: int
    value_rows: int


TARGETS = (
    Target("910B3", "Ascend910B3", 40, 192 << 10, 1600, 64),
    Target("950PR", "Ascend950PR_9579", 64, 248 << 10, 1600, 64),
)


def target(name: str | None = None) -> Target:
    """The target that fits a chip (this one if left out), or the smaller one where none is known."""
    return TARGETS[1 if (chip() if name is None else name).startswith("Ascend950") else 0]


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on any host's CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _cores() -> int:
    """Vector cores of this device, as triton-ascend's driver counts them."""
    if interpreted():
        return target().vector_cores
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(torch.npu.current_device())  # pyright: ignore
    return properties["num_vectorcore"]


def programs(items: int, *, cube: bool = False) -> tuple[int]:
    """The grid for so many items: a program a vector core, or an item where there are fewer. cube: of a
    kernel with products, whose program takes a cube unit and the two vector cores beside it."""
    return (min(items, _cores() // 2 if cube else _cores()),)


def start(kernel: Any, items: int, *, cube: bool = False) -> Callable[..., None]:
    """A Triton kernel with the grid for so many items; call it with the kernel's arguments."""
    return kernel[programs(items, cube=cube)]


def missing() -> str | None:
    """What this host lacks to run the kernels; None where nothing is. Looks without importing Triton."""
    found = importlib.util.find_spec("triton")
    if found is None:
        return "triton-ascend is not installed"
    folders = map(Path, found.submodule_search_locations or ())
    if not interpreted() and not any((folder / "backends" / "ascend").is_dir() for folder in folders):
        return "the installed Triton has no backend for Ascend NPUs: triton-ascend brings it"
    return None


_SIDES = ("K", "latent", "rope")
"""Sizes that are the side of a tile as they are."""


def refusal(call: Call) -> str | None:
    """Why the kernels can't take a call on this host."""
    if (reason := missing()) is not None:
        return reason
    if call.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels compute in float32, not in {call.dtype}"
    for name in _SIDES:
        if not _is_power_of_two(value := call.dims.get(name, 1)):
            return f"{name} {value} is no power of two"
    return None


def _is_power_of_two(value: int) -> bool:
    return value > 0 and not value & (value - 1)


def holding(count: int) -> int:
    """The least side of a tile that holds so many, 1 or more."""
    return 1 << (count - 1).bit_length()


def power_of_two(name: str, value: int) -> int:
    """The value. Raises ValueError where it is none: a Triton tile's side has to be one."""
    if not _is_power_of_two(value):
        raise ValueError(
            f"{name} = {value}: the Triton kernels take a power of two; use another implementation"
        )
    return value
