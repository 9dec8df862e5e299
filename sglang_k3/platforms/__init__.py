"""Entry point of group `sglang.srt.platforms`: our CPU platform, where there is no accelerator."""

from __future__ import annotations

import os


def activate() -> str | None:
    """The class path of our platform, or None to step aside.

    SGLang asks this in every process. With a GPU or an NPU present, or when the user chose SGLang's own
    CPU engine (SGLANG_USE_CPU_ENGINE=1), its platform stays; on an NPU the general plugin does the rest.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "") in ("1", "true", "True"):
        return None
    import torch

    npu = getattr(torch, "npu", None)
    if torch.cuda.is_available() or (npu is not None and npu.is_available()):
        return None
    return "sglang_k3.platforms.cpu.K3CpuPlatform"
