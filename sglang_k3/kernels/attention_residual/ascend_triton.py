"""Launches of attention_residual/triton.py as torch operators that graphs take. Not run on hardware.

block_prepare has none: it is two products of a bank with its readers, which torch hands to the cube units.
"""

from __future__ import annotations

import torch

from sglang_k3.kernels.ascend import DEVICE
from sglang_k3.kernels.registry import register
from sglang_k3.kernels.triton_targets import NAME, PREFERENCE, refusal, start


def _width(columns: int) -> int:
    """The tile that holds a row."""
    return 1 << (columns - 1).bit_length()


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
            BD=_width(width),
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
            BD=_width(width),
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


@torch.library.register_fake("sglang_k3::attention_residual_mix")
@torch.library.register_fake("sglang_k3::attention_residual_mix_norm")
@torch.library.register_fake("sglang_k3::attention_residual_merge")
@torch.library.register_fake("sglang_k3::attention_residual_merge_norm")
def _(partial, *rest) -> torch.Tensor:
    return partial.new_empty(partial.shape)
