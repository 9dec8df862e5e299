"""Launches of attention_residual/triton*.py as torch operators that graphs take. Not run on hardware."""

from __future__ import annotations

import torch

from sglang_k3.kernels.ascend import DEVICE
from sglang_k3.kernels.attention_residual.summary import Summary
from sglang_k3.kernels.registry import register
from sglang_k3.kernels.triton_targets import NAME, PREFERENCE, holding, refusal, start

_COLUMNS = 128
_GROUP = 4
"""Tokens that share one load of the key weights: 64 of them, the most that are mixed so, are 16 items."""
_SHORTEST, _TALLEST = 16, 32
"""Rows of a tile: the side of a cube unit's product at least, and no more where a token alone has no more."""
_MIXES = 32
"""Kimi K3's blocks have 24 readers."""


def _mix(
    partial: torch.Tensor,
    bank: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
) -> torch.Tensor:
    """`reference.mix`, and the RMSNorm behind it where there is a norm_weight."""
    from sglang_k3.kernels.attention_residual import triton as kernels

    (tokens, width), rows = partial.shape, bank.shape[0]
    bank = bank if bank.stride()[1:] == (width, 1) else bank.contiguous()
    out = partial.new_empty(tokens, width)
    if tokens:
        start(kernels.mix, tokens)(
            partial.contiguous(),
            bank,
            key_weight,
            key_weight if norm_weight is None else norm_weight,
            out,
            eps,
            norm_eps,
            tokens,
            rows,
            bank.stride(0),
            D=width,
            BD=holding(width),
            NORM=norm_weight is not None,
        )
    return out


def _merge(
    partial: torch.Tensor,
    acc: torch.Tensor,
    maximum: torch.Tensor,
    total: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
) -> torch.Tensor:
    """`reference.merge_partial`, and the RMSNorm behind it where there is a norm_weight."""
    from sglang_k3.kernels.attention_residual import triton as kernels

    tokens, width = partial.shape
    out = partial.new_empty(tokens, width)
    if tokens:
        start(kernels.merge_partial, tokens)(
            partial.contiguous(),
            acc.contiguous(),
            maximum.contiguous(),
            total.contiguous(),
            key_weight,
            key_weight if norm_weight is None else norm_weight,
            out,
            eps,
            norm_eps,
            tokens,
            D=width,
            BD=holding(width),
            NORM=norm_weight is not None,
        )
    return out


@register("attention_residual.mix", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
@torch.library.custom_op("sglang_k3::attention_residual_mix", mutates_args=())
def mix(partial: torch.Tensor, bank: torch.Tensor, key_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `reference.mix`."""
    return _mix(partial, bank, key_weight, eps, None, 0.0)


@register("attention_residual.mix_norm", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
@torch.library.custom_op("sglang_k3::attention_residual_mix_norm", mutates_args=())
def mix_norm(
    partial: torch.Tensor,
    bank: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    norm_weight: torch.Tensor,
    norm_eps: float,
) -> torch.Tensor:
    """See `reference.mix_norm`."""
    return _mix(partial, bank, key_weight, eps, norm_weight, norm_eps)


@register("attention_residual.merge_partial", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
@torch.library.custom_op("sglang_k3::attention_residual_merge", mutates_args=())
def merge_partial(
    partial: torch.Tensor,
    acc: torch.Tensor,
    maximum: torch.Tensor,
    total: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """See `reference.merge_partial`."""
    return _merge(partial, acc, maximum, total, key_weight, eps, None, 0.0)


@register("attention_residual.merge_norm", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
@torch.library.custom_op("sglang_k3::attention_residual_merge_norm", mutates_args=())
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
    """See `reference.merge_norm`."""
    return _merge(partial, acc, maximum, total, key_weight, eps, norm_weight, norm_eps)


@torch.library.custom_op("sglang_k3::attention_residual_prepare", mutates_args=())
def _prepare(
    bank: torch.Tensor, key_weights: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of `reference.block_prepare`'s Summary."""
    from sglang_k3.kernels.attention_residual import triton_prepare as kernels

    (rows, tokens, width), mixes = bank.shape, key_weights.shape[0]
    acc, maximum, total = _summary_like(bank, key_weights)
    if not rows:
        return acc.zero_(), maximum.fill_(float("-inf")), total.zero_()
    bank = bank if bank.stride()[1:] == (width, 1) else bank.contiguous()
    depth = holding(rows)
    group = max(1, min(_GROUP, _TALLEST // depth))
    if items := -(-tokens // group) * -(-mixes // _MIXES):
        start(kernels.block_prepare, items, cube=True)(
            bank,
            key_weights.contiguous(),
            acc,
            maximum,
            total,
            eps,
            items,
            tokens,
            rows,
            mixes,
            bank.stride(0),
            D=width,
            BC=_COLUMNS,
            GROUP=group,
            DEPTH=depth,
            ROWS=max(_SHORTEST, group * depth),
            MIXES=_MIXES,
        )
    return acc, maximum, total


@torch.library.register_fake("sglang_k3::attention_residual_prepare")
def _summary_like(bank, key_weights, *rest) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mixes, (_, tokens, width) = key_weights.shape[0], bank.shape
    acc = bank.new_empty(mixes, tokens, width, dtype=torch.float32)
    maximum, total = (bank.new_empty(mixes, tokens, dtype=torch.float32) for _ in range(2))
    return acc, maximum, total


@register("attention_residual.block_prepare", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
def block_prepare(bank: torch.Tensor, key_weights: torch.Tensor, eps: float) -> Summary:
    """See `reference.block_prepare`."""
    return Summary(*_prepare(bank, key_weights, eps))


@torch.library.register_fake("sglang_k3::attention_residual_mix")
@torch.library.register_fake("sglang_k3::attention_residual_mix_norm")
@torch.library.register_fake("sglang_k3::attention_residual_merge")
@torch.library.register_fake("sglang_k3::attention_residual_merge_norm")
def _(partial, *rest) -> torch.Tensor:
    return partial.new_empty(partial.shape)
