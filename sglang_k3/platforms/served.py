"""Which device this process serves our models on."""

from __future__ import annotations


def served_device() -> str | None:
    """ "cpu" on our CPU platform, "npu" on SGLang's NPU platform. Elsewhere SGLang stays as it is."""
    from sglang.srt.platforms import current_platform

    from sglang_k3.platforms.cpu import K3CpuPlatform

    if isinstance(current_platform, K3CpuPlatform):
        return "cpu"
    return "npu" if current_platform.device_type == "npu" else None
