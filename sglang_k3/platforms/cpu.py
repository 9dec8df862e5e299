"""The out-of-tree CPU platform: stock SGLang on plain torch, with what a CPU machine needs solved here.

SGLang's in-tree CPU engine needs a build of its kernels that no package index carries; an out-of-tree
platform takes the torch paths instead. This class also decides what SGLang leaves to the user on a CPU:
thread counts, which cores a rank owns, and that nothing is compiled at the first request.
"""

from __future__ import annotations

import logging
import os

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

logger = logging.getLogger(__name__)

# torch.compile would spend 20 s on small helper functions at the first request.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def allowed_cores() -> list[int]:
    """The cores this process may run on (a container's share, not the machine's)."""
    return sorted(os.sched_getaffinity(0))


def split_cores(cores: list[int], ranks: int) -> str:
    """SGLang's SGLANG_CPU_OMP_THREADS_BIND value that gives each rank its own cores, such as "0,1|2,3".

    With more ranks than cores several ranks share one: slow, but it starts.
    """
    if ranks > len(cores):
        groups = [[cores[rank % len(cores)]] for rank in range(ranks)]
    else:
        share, extra = divmod(len(cores), ranks)
        groups, start = [], 0
        for rank in range(ranks):
            width = share + (rank < extra)
            groups.append(cores[start : start + width])
            start += width
    return "|".join(",".join(map(str, group)) for group in groups)


class K3CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A plain CPU: no Triton launches, no graphs, no pinned memory."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device=None) -> bool:
        return False

    def apply_server_args_defaults(self, server_args) -> None:
        from sglang_k3 import upstream

        upstream.verify()
        ranks = server_args.tp_size * server_args.pp_size
        if ranks > 1 and "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ:
            # SGLang asks for one NUMA node a rank otherwise, which no small machine has.
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = split_cores(allowed_cores(), ranks)
            logger.info("CPU cores of the %d ranks: %s", ranks, os.environ["SGLANG_CPU_OMP_THREADS_BIND"])

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    def get_quantization_config(self, quantization: str):
        if quantization != "compressed-tensors":
            return None
        from sglang_k3.moe.quantization import CompressedTensorsOrMxfp4

        return CompressedTensorsOrMxfp4

    def init_backend(self) -> None:
        """Once in each worker: as many threads as the process has cores (torch's own default counts the
        machine's, which oversubscribes a container; an explicit OMP_NUM_THREADS wins)."""
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(len(allowed_cores()))
