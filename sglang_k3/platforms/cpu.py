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

# The scheduler process inherits these. torch.compile would spend 20 s on small helper functions at the
# first request. torch and numba bring an OpenMP runtime each, whose idle threads spin by default and take
# the cores from one another: a decode step of a small model took 10 times longer.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def allowed_cores() -> list[int]:
    """The cores this process may run on (a container's share, not the machine's)."""
    return sorted(os.sched_getaffinity(0))


def cores_of_rank(cores: list[int], rank: int, ranks: int) -> list[int]:
    """An even share of the cores for each rank. With more ranks than cores several share one: slow, but
    it starts."""
    if ranks > len(cores):
        return [cores[rank % len(cores)]]
    return cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]


def bind_rank(rank: int, ranks: int) -> list[int]:
    """Give this worker process its cores and as many torch threads (numba takes torch's number).

    torch's own default counts the machine's cores, not those the process may use. An explicit
    OMP_NUM_THREADS wins.
    """
    cores = cores_of_rank(allowed_cores(), rank, ranks)
    os.sched_setaffinity(0, cores)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(cores))
    logger.info("rank %d of %d: cores %s, %d threads", rank, ranks, cores, torch.get_num_threads())
    return cores


class K3CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A plain CPU: no Triton launches, no graphs, no pinned memory."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device=None) -> bool:
        return False

    def apply_server_args_defaults(self, server_args) -> None:
        """Runs in the main process, whether or not the general plugin was let in."""
        from sglang_k3 import arguments, registration

        if registration.left_out():
            arguments.refuse_without_plugin(server_args)
        else:
            registration.verify()
        if server_args.attention_backend == "intel_amx":
            # SGLang's default for a CPU; it needs a build of its kernels that no package index carries.
            server_args.attention_backend = "torch_native"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm.upper() == "DSPARK"

    def get_speculative_worker_cls(self, algorithm: str):
        if algorithm.upper() != "DSPARK":
            return None
        from sglang_k3.speculative.dspark_worker import K3DSparkWorker

        return K3DSparkWorker

    def get_speculative_cache_locs_fn(self):
        from sglang_k3.platforms.token_slots import of_range

        return of_range

    def get_kv_pool_cls(self, *, kind):
        if kind != "mha":
            return None
        from sglang_k3.platforms.kv_pool import CpuMHATokenToKVPool

        return CpuMHATokenToKVPool

    def get_quantization_config(self, quantization: str):
        if quantization != "compressed-tensors":
            return None
        from sglang_k3.moe.quantization import CompressedTensorsOrMxfp4

        return CompressedTensorsOrMxfp4
