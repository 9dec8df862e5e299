"""Doubles of kernels that an Ascend host brings and SGLang launches around our model: its allocator's, its
slot tables'. Plain torch, by SGLang's own contracts; each runs where its caller expects a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _Launch:
    """`kernel[grid](...)`, without a grid."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self._function


def alloc_extend(
    prefix_lens, seq_lens, last_loc, free_pages, out_indices, bs_upper, page_size, max_num_extend_tokens
) -> None:
    """Slots of each request's new tokens: first the rest of its last page, then whole free pages in order."""
    from sglang.srt.mem_cache.allocator import alloc_extend_naive

    alloc_extend_naive(
        prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, out_indices.device.type
    )


def assign_slots(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len, bs_upper
) -> None:
    """Write the slots of start .. end of each request into its row of the table, slots one after another."""
    lengths = (end_offset - start_offset).long()
    total = out_cache_loc.shape[0]
    request = torch.repeat_interleave(
        torch.arange(len(lengths), device=lengths.device), lengths, output_size=total
    )
    first = (lengths.cumsum(0) - lengths)[request]
    column = start_offset.long()[request] + torch.arange(total, device=lengths.device) - first
    req_to_token[req_pool_indices.long()[request], column] = out_cache_loc.to(req_to_token.dtype)


def cache_loc_update(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc) -> None:
    """Read the slots of equally many tokens behind each start."""
    width = out_cache_loc.shape[0] // max(len(req_pool_indices), 1)
    column = start_offset.long().unsqueeze(1) + torch.arange(width, device=req_to_token.device)
    found = req_to_token[req_pool_indices.long().unsqueeze(1), column]
    out_cache_loc.copy_(found.flatten().to(out_cache_loc.dtype))


_libraries: list[torch.library.Library] = []


def install() -> None:
    """Behind stand_ins.install() and before a scheduler starts."""
    import sgl_kernel_npu.mem_cache.allocator as allocator  # type: ignore[import-not-found]
    from sglang.srt.mem_cache import allocation
    from sglang.srt.model_executor import forward_batch_info

    setattr(allocator, "alloc_extend_kernel", _Launch(alloc_extend))  # noqa: B010
    setattr(allocation, "assign_req_to_token_pool", _Launch(assign_slots))  # noqa: B010
    # SGLang's own forms without a kernel, for the slot table and the positions of a prefill.
    for module in (allocation, forward_batch_info):
        setattr(module, "support_triton", lambda backend: False)  # noqa: B010
    library = torch.library.Library("npu", "FRAGMENT")
    library.define(
        "cache_loc_update(Tensor rows, Tensor table, Tensor starts, Tensor ends, Tensor(a!) out) -> ()"
    )
    library.impl("cache_loc_update", cache_loc_update, "CompositeExplicitAutograd")
    _libraries.append(library)
