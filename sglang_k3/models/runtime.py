"""What a model module asks of the process it is built in: which kernels, and how ranks add up."""

from __future__ import annotations

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_exec, get_parallel

from sglang_k3.kernels.native import native_bf16
from sglang_k3.kernels.registry import Call


def exact_mode() -> bool:
    """Whether the server runs with --enable-deterministic-inference."""
    return bool(get_exec().deterministic.enable_deterministic_inference)


def kernel_call(dtype: torch.dtype | None = None) -> Call:
    """The registry call of a module under construction; dtype defaults to the model's."""
    return Call(current_platform.device_type, dtype or torch.get_default_dtype(), exact_mode())


def activation_dtype() -> torch.dtype:
    """`compute_dtype` of the model under construction; once it is built, torch's default says nothing."""
    return compute_dtype(torch.get_default_dtype())


def compute_dtype(dtype: torch.dtype, device: str | None = None) -> torch.dtype:
    """What the layers of a model compute and hand on: its dtype, but fp32 for a bf16 model on a CPU without
    bf16 instructions, where every kernel would widen its inputs and round its outputs for nothing.

    device: a torch device type, by default this process's.
    """
    device = device or current_platform.device_type
    widen = dtype == torch.bfloat16 and device == "cpu" and not native_bf16()
    return torch.float32 if widen else dtype


def add_ranks(partial: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over the tensor-parallel ranks.

    An all-reduce may add the ranks in another order for another message size; in exact mode the ranks'
    parts are gathered and added in rank order, so a row's bits do not depend on the batch.
    """
    ranks = get_parallel().tp_size
    if ranks == 1:
        return partial
    group = get_tp_group()
    if not exact_mode():
        return group.all_reduce(partial)
    parts = group.all_gather(partial.unsqueeze(0).contiguous(), dim=0)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
