"""Whose kernels are asked first: SGLANG_K3_KERNELS. Left out, each implementation's own preference tells."""

from __future__ import annotations

import os

VARIABLE = "SGLANG_K3_KERNELS"
TRITON = "triton"
"""Our Triton kernels for Ascend NPUs, under the name that they have in the registry."""

FIRST = (TRITON,)
"""Values of the variable: implementations of that name come before all others."""


def first() -> str | None:
    """The name that comes first; None where the variable is not set. Raises ValueError for an unknown one."""
    name = os.environ.get(VARIABLE)
    if name is not None and name not in FIRST:
        raise ValueError(
            f"{VARIABLE}={name}: pass {' or '.join(FIRST)}, or unset it for the order that "
            "`sglang-k3 doctor` shows"
        )
    return name


def check(device: str) -> None:
    """Raises ValueError where this server cannot do what the variable asks. device: a torch device type."""
    name = first()
    if name is None:
        return
    if device != "npu":
        raise ValueError(
            f"{VARIABLE}={name}: our Triton kernels are built for Ascend NPUs, and this is a server on a "
            f"{device.upper()}: unset it"
        )
    # Behind the check of the device: who only asks for the order needs none of it.
    from sglang_k3.kernels.triton_targets import missing

    if (reason := missing()) is not None:
        raise ValueError(f"{VARIABLE}={name}: {reason}. Install it, or unset the variable")
