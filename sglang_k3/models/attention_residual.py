"""The residual stream: attention residuals over a bank of block sums (K3), or a plain sum (Kimi Linear).

Both have the same verbs, so a decoder layer reads the same for either:

    h = stream.read(reader)     the residual mix, or stream.read_normed(reader, norm), what a sub-layer sees
    stream.close_block()        K3: the running sum joins the bank and starts anew
    stream.add(out)             the sub-layer's output joins the running sum

Source: arXiv 2603.15031, block form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from sglang_k3.kernels.attention_residual.summary import Summary
from sglang_k3.kernels.registry import choose, choose_fused
from sglang_k3.models.layers import RMSNorm
from sglang_k3.models.runtime import exact_mode, kernel_call

# The two-phase form keeps one [T, D] fp32 partial result per later reader of the block. It saves reading
# the bank again for each of them while those fit a cache (decode, verify); a long prefill would only
# move the traffic into memory, so it mixes plainly.
TWO_PHASE_TOKENS = 64


class ResidualReader(nn.Module):
    """The learned query of one mix: key_weight [D] fp32, norm weight times projection.

    The two checkpoint tensors stay parameters of the owner (their names are the checkpoint's); `fold`
    multiplies them once, after loading. `index` numbers the reader among those of its bank.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("key_weight", torch.empty(width, dtype=torch.float32), persistent=False)
        self.index = 0

    def fold(self, norm: torch.Tensor, projection: torch.Tensor) -> None:
        self.key_weight = norm.float() * projection.float().view(-1)


@dataclass
class Kernels:
    """The operators of one model, chosen once; eps of the key norm; whether exact mode is on. The last two do
    a mix and the next norm in one pass; None where the device has no such operator."""

    mix: Callable[..., torch.Tensor]
    prepare: Callable[..., Summary]
    merge: Callable[..., torch.Tensor]
    eps: float
    exact: bool
    mix_norm: Callable[..., torch.Tensor] | None = None
    merge_norm: Callable[..., torch.Tensor] | None = None

    @staticmethod
    def chosen(eps: float) -> Kernels:
        call = kernel_call()
        return Kernels(
            mix=choose("attention_residual.mix", call),
            prepare=choose("attention_residual.block_prepare", call),
            merge=choose("attention_residual.merge_partial", call),
            eps=eps,
            exact=exact_mode(),
            mix_norm=choose_fused("attention_residual.mix_norm", call),
            merge_norm=choose_fused("attention_residual.merge_norm", call),
        )


class BankedStream:
    """K3's stream of one forward. bank [B, T, D] is allocated once; rows beyond `rows` are unwritten.

    readers[n] holds the stacked key weights [M, D] of all readers that see exactly n rows.
    """

    def __init__(
        self, hidden: torch.Tensor, blocks: int, readers: list[torch.Tensor], kernels: Kernels
    ) -> None:
        self.partial: torch.Tensor | None = hidden
        self.bank = hidden.new_empty(blocks, *hidden.shape)
        self.rows = 0
        self.readers = readers
        self.kernels = kernels
        self.two_phase = hidden.shape[0] <= TWO_PHASE_TOKENS and not kernels.exact
        self.summary: Summary | None = None

    def read(self, reader: ResidualReader | None) -> torch.Tensor:
        return self._read(reader, self.kernels.mix, self.kernels.merge)

    def read_normed(self, reader: ResidualReader | None, norm: RMSNorm) -> torch.Tensor:
        """`norm` of what the reader sees, in one operator where there is one."""
        mix, merge = self.kernels.mix_norm, self.kernels.merge_norm
        if mix is None or merge is None or self.rows == 0:
            return norm(self.read(reader))
        return self._read(reader, mix, merge, norm.weight, norm.eps)

    def _read(
        self,
        reader: ResidualReader | None,
        mix: Callable[..., torch.Tensor],
        merge: Callable[..., torch.Tensor],
        *norm: torch.Tensor | float,
    ) -> torch.Tensor:
        """By `mix`, or in two phases by `merge`; norm: what a fused form takes besides."""
        assert reader is not None and self.partial is not None, "a block's first sub-layer has not answered"
        kernels = self.kernels
        if self.rows == 0:
            return self.partial
        if not self.two_phase:
            return mix(self.partial, self.bank[: self.rows], reader.key_weight, kernels.eps, *norm)
        summary = self.summary
        if summary is None:
            summary = kernels.prepare(self.bank[: self.rows], self.readers[self.rows], kernels.eps)
            self.summary = summary
        acc, maximum, total = (part[reader.index] for part in summary)
        return merge(self.partial, acc, maximum, total, reader.key_weight, kernels.eps, *norm)

    def close_block(self) -> None:
        assert self.partial is not None
        self.bank[self.rows] = self.partial
        self.rows += 1
        self.partial = None
        self.summary = None

    def add(self, out: torch.Tensor) -> None:
        self.partial = out if self.partial is None else self.partial + out


class PlainStream:
    """The classic residual stream: one running sum, read as it is."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.partial = hidden

    def read(self, reader: ResidualReader | None) -> torch.Tensor:
        return self.partial

    def read_normed(self, reader: ResidualReader | None, norm: RMSNorm) -> torch.Tensor:
        return norm(self.partial)

    def close_block(self) -> None:
        raise AssertionError("a plain residual stream has no blocks")

    def add(self, out: torch.Tensor) -> None:
        self.partial = self.partial + out
