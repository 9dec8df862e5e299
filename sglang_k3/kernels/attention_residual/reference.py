"""Oracle of the attention-residual mix (arXiv 2603.15031, block form), in one and in two phases."""

from __future__ import annotations

import torch

from sglang_k3.kernels import registry
from sglang_k3.kernels.attention_residual.summary import Summary
from sglang_k3.kernels.rms_norm.reference import rms_norm


@registry.register("attention_residual.mix", "reference", preference=0, device="any")
def mix(partial: torch.Tensor, bank: torch.Tensor, key_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Softmax-weighted sum of the bank rows and the running sum -> [T, D] in partial's dtype.

    partial [T, D], bank [n, T, D], key_weight [D] fp32 (norm weight times projection). Scores read the
    RMS-normalised rows, the sum takes them un-normalised. n = 0 gives `partial` itself.
    """
    if bank.shape[0] == 0:
        return partial.clone()
    wide = torch.promote_types(partial.dtype, torch.float32)
    rows = torch.cat([bank.to(wide), partial.to(wide).unsqueeze(0)])
    share = torch.softmax(_scores(rows, key_weight.to(wide), eps), dim=0)
    return (share.unsqueeze(-1) * rows).sum(0).to(partial.dtype)


@registry.register("attention_residual.block_prepare", "reference", preference=0, device="any")
def block_prepare(bank: torch.Tensor, key_weights: torch.Tensor, eps: float) -> Summary:
    """First phase: bank [n, T, D], key_weights [M, D] fp32 -> Summary of M mixes over it."""
    rows = bank.to(torch.promote_types(bank.dtype, torch.float32))
    mixes, (count, tokens, width) = key_weights.shape[0], rows.shape
    if count == 0:
        return Summary(
            rows.new_zeros(mixes, tokens, width),
            rows.new_full((mixes, tokens), float("-inf")),
            rows.new_zeros(mixes, tokens),
        )
    scores = torch.stack([_scores(rows, weight.to(rows.dtype), eps) for weight in key_weights])  # [M, n, T]
    maximum = scores.amax(1)
    share = torch.exp(scores - maximum.unsqueeze(1))
    return Summary(torch.einsum("mnt,ntd->mtd", share, rows), maximum, share.sum(1))


@registry.register("attention_residual.merge_partial", "reference", preference=0, device="any")
def merge_partial(
    partial: torch.Tensor,
    acc: torch.Tensor,
    maximum: torch.Tensor,
    total: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Second phase: one mix of a Summary (acc [T, D], maximum [T], total [T]) joined by partial [T, D]."""
    row = partial.to(acc.dtype)
    score = _scores(row, key_weight.to(acc.dtype), eps)
    top = torch.maximum(maximum, score)
    bank_share, row_share = torch.exp(maximum - top), torch.exp(score - top)
    mixed = acc * bank_share.unsqueeze(-1) + row * row_share.unsqueeze(-1)
    return (mixed / (total * bank_share + row_share).unsqueeze(-1)).to(partial.dtype)


@registry.register("attention_residual.mix_norm", "reference", preference=0, device="any", composed=True)
def mix_norm(
    partial: torch.Tensor,
    bank: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    norm_weight: torch.Tensor,
    norm_eps: float,
) -> torch.Tensor:
    """`mix` and the RMSNorm of the sub-layer that reads it, whose weight [D] is norm_weight -> [T, D]."""
    return rms_norm(mix(partial, bank, key_weight, eps), norm_weight, norm_eps)


@registry.register("attention_residual.merge_norm", "reference", preference=0, device="any", composed=True)
def merge_norm(
    partial: torch.Tensor,
    acc: torch.Tensor,
    maximum: torch.Tensor,
    total: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    norm_weight: torch.Tensor,
    norm_eps: float,
) -> torch.Tensor:
    """`merge_partial` and the RMSNorm of the sub-layer that reads it."""
    return rms_norm(merge_partial(partial, acc, maximum, total, key_weight, eps), norm_weight, norm_eps)


def _scores(rows: torch.Tensor, key_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., D] -> [...]: the RMS-normalised row times the folded key weight."""
    return (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * key_weight).sum(-1)
