"""Which of N requests' drafted rows a verify computes: packed for the forward, dense for what follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout


@dataclass(frozen=True)
class RaggedRows:
    """counts [N] int64, 1..width: the first rows of each request. mask [N, width] bool; None: all of them."""

    counts: torch.Tensor
    width: int
    mask: torch.Tensor | None

    @staticmethod
    def of(counts: torch.Tensor) -> RaggedRows:
        width = int(counts.max())
        mask = torch.arange(width, device=counts.device) < counts.unsqueeze(1)
        return RaggedRows(counts, width, None if bool(mask.all()) else mask)

    def pack(self, dense: torch.Tensor) -> torch.Tensor:
        """[N, width, ...] -> [T, ...], request by request."""
        return dense.flatten(0, 1) if self.mask is None else dense[self.mask]

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [N * width, ...], zero where nothing was computed."""
        if self.mask is None:
            return packed
        dense = packed.new_zeros(self.mask.numel(), *packed.shape[1:])
        dense[self.mask.flatten()] = packed
        return dense

    def layout(self) -> RaggedVerifyLayout | None:
        """What SGLang and our backends are told about the packing; None where every request has as many."""
        if self.mask is None:
            return None
        ends = torch.zeros(len(self.counts) + 1, dtype=torch.int32, device=self.counts.device)
        torch.cumsum(self.counts, 0, out=ends[1:])
        return RaggedVerifyLayout(
            verify_lens=self.counts.to(torch.int32),
            graph_num_tokens=int(ends[-1]),
            extend_start_loc=ends[:-1],
            qo_indptr_device=ends,
        )
