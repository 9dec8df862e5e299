"""Version gate, registration of what `upstream` lists, and the look whether it took.

SGLang only logs a hook that fails, so `verify` looks whether each one is in force, and is called where it
counts: when arguments are resolved (main process), and when the model class is looked up, the attention
backend is built and the weights are in (each worker).

This module imports the standard library alone, and SGLang when it is asked.
"""

from __future__ import annotations

import logging
import os
from importlib import metadata
from typing import Any

from sglang_k3 import upstream
from sglang_k3.platforms.served import served_device

logger = logging.getLogger(__name__)

PLUGIN = "k3"  # our entry point's name in the group sglang.srt.plugins

_originals: dict[str, Any] = {}


def check_version() -> None:
    """Raises UpstreamError unless the validated SGLang is installed."""
    wanted = f"sglang=={upstream.VALIDATED_SGLANG}"
    try:
        installed = metadata.version("sglang")
    except metadata.PackageNotFoundError as error:
        raise upstream.UpstreamError(f"SGLang is not installed: pip install {wanted}") from error
    if installed != upstream.VALIDATED_SGLANG:
        raise upstream.UpstreamError(
            f"SGLang {installed} is installed, but sglang-k3 is validated with {upstream.VALIDATED_SGLANG} "
            f"only: pip install {wanted}"
        )


def hooks() -> list[upstream.Hook]:
    """Those of the device that this process runs on."""
    return [hook for hook in upstream.HOOKS if served_device() in hook.devices]


def changes() -> list[upstream.Change]:
    """Those of the device that this process runs on."""
    return [change for change in upstream.CHANGES if served_device() in change.devices]


def register() -> None:
    """Apply every change and hand every hook to SGLang's registry. Raises UpstreamError."""
    if served_device() is None:
        logger.warning(
            "sglang-k3 registers nothing: this release serves Kimi K3 on CPUs and Ascend NPUs, and SGLang "
            "selected another platform here."
        )
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for change in changes():
        change.apply()
    for hook in hooks():
        _originals[hook.target] = upstream.attribute(hook.target)
        HookRegistry.register(hook.target, hook.around, HookType.AROUND)


def left_out() -> bool:
    """Whether the user's SGLANG_PLUGINS keeps our general plugin from being loaded."""
    names = os.environ.get("SGLANG_PLUGINS")
    return names is not None and PLUGIN not in {name.strip() for name in names.split(",")}


def failures() -> list[str]:
    """One line for each change or hook that is not in force; empty when all took."""
    lost = [f"change {change.name!r} is not in force" for change in changes() if not change.holds()]
    for hook in hooks():
        if hook.target not in _originals:
            lost.append(f"hook on {hook.target} was never registered")
        elif upstream.attribute(hook.target) is _originals[hook.target]:
            lost.append(f"hook on {hook.target} did not take")
    return lost


def verify() -> None:
    """Raises UpstreamError naming every hook or change that is not in force in this process."""
    lost = failures()
    if lost:
        raise upstream.UpstreamError(
            "sglang-k3 is not fully plugged in: " + "; ".join(lost) + ". Start the server with "
            "`python -m sglang.launch_server` and see `sglang-k3 doctor`."
        )
