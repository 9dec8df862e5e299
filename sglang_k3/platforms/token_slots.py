"""Token slots of speculative windows in plain torch: SGLang writes and reads them with Triton kernels."""

from __future__ import annotations

from typing import Any

import torch


def assign(
    request_rows: torch.Tensor,
    table: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """table[request_rows[n], begins[n] : ends[n]] = the next slots, in the order of the requests.

    table [R, max_len]; request_rows, begins, ends [N]; slots [sum of the lengths].
    """
    lengths = (ends - begins).long()
    rows = request_rows.long().repeat_interleave(lengths)
    first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    columns = begins.long().repeat_interleave(lengths) + torch.arange(len(rows)) - first
    table[rows, columns] = slots[: len(rows)].to(table.dtype)


def of_range(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """SGLang's contract: the slots of draft_token_num positions behind each start_offset, [N * D] int64."""
    columns = start_offset.long().unsqueeze(1) + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.long().unsqueeze(1), columns].reshape(-1).long()
