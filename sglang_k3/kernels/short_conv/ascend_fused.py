"""short_conv's decode step by sgl_kernel_npu's causal_conv1d, which moves the window in the same launch.

Its other modes are left out: prefill cannot keep a window inside the prompt for a checkpoint, and verify
writes drafted rows into the live window.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_k3.kernels.ascend import DEVICE, absent, package_operator
from sglang_k3.kernels.registry import Call, register

_SILU, _NOBODY, _STEP = 1, -1, 1
_WIDTHS = range(2, 5)


def _operator() -> Any | None:
    return package_operator("sgl_kernel_npu", "npu", "causal_conv1d")


def _supports(call: Call) -> str | None:
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 or float16, not {call.dtype}"
    operator = _operator()
    if operator is None:
        return absent("sgl_kernel_npu", "causal_conv1d")
    (windows,) = (one for one in operator.default._schema.arguments if one.name == "conv_states")
    if windows.alias_info is None or not windows.alias_info.is_write:
        return "this release does not declare that it writes the windows, so no check of streams would see it"
    return None


@register(
    "short_conv.decode", "sgl_kernel_npu causal_conv1d", preference=20, device=DEVICE, supports=_supports
)
def decode(
    x: torch.Tensor, weight: torch.Tensor, window_pool: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """See `reference.decode`. Raises ValueError for operands that do not fit."""
    (tokens, channels), width = x.shape, weight.shape[-1]
    if weight.shape != (channels, width) or width not in _WIDTHS:
        raise ValueError(f"short_conv: taps {tuple(weight.shape)} for rows of {channels}; widths are 2 to 4")
    if window_pool.shape[1:] != (width - 1, channels) or slots.shape != (tokens,):
        raise ValueError(
            f"short_conv: windows {tuple(window_pool.shape)} and slots {tuple(slots.shape)} do not fit "
            f"{tokens} rows of {channels} and {width} taps"
        )
    operator = _operator()
    assert operator is not None
    y = operator(
        x.contiguous(),
        weight.t().to(x.dtype).contiguous(),
        window_pool,
        query_start_loc=torch.arange(tokens + 1, dtype=torch.int32, device=x.device),
        cache_indices=slots.to(torch.int32),
        activation_mode=_SILU,
        pad_slot_id=_NOBODY,
        run_mode=_STEP,
    )
    return y.masked_fill((slots < 0).unsqueeze(1), 0.0)
