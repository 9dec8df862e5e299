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


@register("attention_residual.mix", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
@torch.library.custom_op("sglang_k3::attention_residual_mix", mutates_args=())
def mix(partial: torch.Tensor, bank: torch.Tensor, key_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `reference.mix`."""
    from sglang_k3.kernels.attention_residual import triton as kernels

    (tokens, width), rows = partial.shape, bank.shape[0]
    bank = bank if bank.stride()[1:] == (width, 1) else bank.contiguous()
    out = partial.new_empty(tokens, width)
    if tokens:
        start(kernels.mix, tokens)(
            partial.contiguous(),
            bank,
            key_weight,
            out,
            eps,
            tokens,
            rows,
            bank.stride(0),
            D=width,
            BD=_width(width),
        )
    return out


@torch.library.register_fake("sglang_k3::attention_residual_mix")
def _(partial, bank, key_weight, eps) -> torch.Tensor:
    return partial.new_empty(partial.shape)


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
            out,
            eps,
            tokens,
            D=width,
            BD=_width(width),
        )
    return out


@torch.library.register_fake("sglang_k3::attention_residual_merge")
def _(partial, *rest) -> torch.Tensor:
    return partial.new_empty(partial.shape)
