"""Launches of mla/triton.py as a torch operator that graphs take. Not run on hardware.

Meant for decode and verify: each two or so rows of a request (of six heads) read its keys again.
"""

from __future__ import annotations

import torch

from sglang_k3.kernels import triton_targets
from sglang_k3.kernels.ascend import DEVICE
from sglang_k3.kernels.mla.ascend import HostLengths
from sglang_k3.kernels.registry import Call, register
from sglang_k3.kernels.triton_targets import NAME, PREFERENCE, power_of_two, programs, start

_ROWS = 16
"""(token, head) pairs of an item: what a cube unit's product has at least."""
_KEYS = 64
"""Positions of a block."""
_MOST_PARTS = 16


def refusal(call: Call) -> str | None:
    """Blocks are read from their first slot on, so the caller has to say how long its pages are."""
    page = call.dims.get("page")
    if page is None or page % _KEYS:
        return f"it reads {_KEYS} neighbouring slots, and pages of {page or 'unknown length'} are no multiple"
    if (heads := call.dims.get("heads", 1)) > _ROWS:
        return f"{heads} heads are more than the {_ROWS} rows of its tile"
    return triton_targets.refusal(call)


@torch.library.custom_op("sglang_k3::mla_paged_attention", mutates_args=())
def attention(
    q: torch.Tensor,
    values: torch.Tensor,
    ropes: torch.Tensor,
    token_table: torch.Tensor,
    request_rows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prefix_lens: torch.Tensor,
    scale: float,
    width: int,
) -> torch.Tensor:
    """`paged_attention` with the cache's parts apart. Raises ValueError for more than 16 heads."""
    from sglang_k3.kernels.mla import triton as kernels

    tokens, heads, _ = q.shape
    latent, rope = power_of_two("latent", values.shape[1]), power_of_two("rope", ropes.shape[1])
    if heads > _ROWS:
        raise ValueError(f"{heads} heads: the Triton kernel takes {_ROWS}; use another implementation")
    q = q if q.stride()[1:] == (latent + rope, 1) else q.contiguous()
    # Rows of padding are nobody's.
    out = q.new_zeros(tokens, heads, latent)
    each = _ROWS // heads
    groups = -(-width // each)
    work = len(request_rows) * groups
    if not work:
        return out
    parts = 1
    while parts < _MOST_PARTS and work * parts * 2 <= programs(work * _MOST_PARTS, cube=True)[0]:
        parts *= 2
    items = work * parts
    mixed = q.new_empty(items, _ROWS, latent, dtype=torch.float32)
    tops, totals = (mixed.new_empty(items, _ROWS) for _ in range(2))
    shape = {"H": heads, "L": latent, "TOKENS": each, "GROUPS": groups, "PARTS": parts, "ROWS": _ROWS}
    start(kernels.attend, items, cube=True)(
        q,
        values,
        ropes,
        token_table,
        request_rows,
        cu_seqlens,
        prefix_lens,
        mixed,
        tops,
        totals,
        scale,
        items,
        q.stride(0),
        token_table.stride(0),
        R=rope,
        KEYS=_KEYS,
        **shape,
    )
    rows = work * each * heads
    start(kernels.join, rows)(mixed, tops, totals, cu_seqlens, out, rows, **shape)
    return out


@torch.library.register_fake("sglang_k3::mla_paged_attention")
def _(q, values, *rest) -> torch.Tensor:
    return q.new_empty(*q.shape[:2], values.shape[1])


@register("mla.paged_attention", NAME, preference=PREFERENCE, device=DEVICE, supports=refusal)
def paged_attention(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    token_table: torch.Tensor,
    request_rows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prefix_lens: torch.Tensor,
    scale: float,
    latent: int,
    *,
    reach: int,
    width: int,
    lengths: HostLengths | None = None,
) -> torch.Tensor:
    """See `ascend.paged_attention`. reach and lengths are not asked for: the device reads its own."""
    numbers = token_table, request_rows, cu_seqlens, prefix_lens
    return attention(q, *cache, *numbers, scale, width)
