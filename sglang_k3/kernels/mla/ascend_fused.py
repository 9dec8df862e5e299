"""Paged latent attention by vendors' fused operators, for K3's own sizes: 512 + 64 columns, pages of 128.

torch_npu's fused-infer attention reads SGLang's two-part pool as it is, but takes lengths as integers of the
host: one copy a step, which a backend starts ahead. CANN's flash_mla_with_kvcache takes them on the device,
and wants latent and rope columns in one row, which SGLang's NPU pool does not keep.
"""

from __future__ import annotations

from functools import cache

import torch

from sglang_k3.kernels.ascend import DEVICE, absent, has_mx, operators, package_operator
from sglang_k3.kernels.mla.ascend import Grid, HostLengths
from sglang_k3.kernels.registry import Call, register

PAGE = 128
_RIGHT_DOWN_CAUSAL = 3
_MASK = 2048
_SIZES = {"latent": 512, "rope": 64, "page": PAGE}
_MLA_HEADS = (64, 96)
"""Query heads that flash_mla_with_kvcache is built for."""


def padded_heads(heads: int) -> int:
    """Heads that fused-infer attention computes for these: the next power of two, up to 128."""
    size = 1
    while size < heads:
        size *= 2
    return size


def _sizes_refused(call: Call) -> str | None:
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 or float16, not {call.dtype}"
    for name, wanted in _SIZES.items():
        if (found := call.dims.get(name, wanted)) != wanted:
            return f"its latent form has {name} {wanted}, not {found}"
    return None


def fused_supports(call: Call) -> str | None:
    heads = call.dims.get("heads", 1)
    if padded_heads(heads) > 128:
        return f"{heads} heads are more than 128"
    return _sizes_refused(call)


def flash_mla_supports(call: Call) -> str | None:
    if not call.dims.get("joined", 0):
        return "SGLang's NPU pool keeps latent and rope columns apart, and it reads them in one row"
    if call.dims.get("heads", 1) > max(_MLA_HEADS):
        return f"{call.dims['heads']} heads are more than {max(_MLA_HEADS)}"
    if not has_mx():
        return "it is built for the Ascend 950 series"
    if package_operator("cann_ops_transformer", "cann_ops_transformer", "flash_mla_with_kvcache") is None:
        return absent("CANN's cann_ops_transformer", "flash_mla_with_kvcache")
    return _sizes_refused(call)


@cache
def _mask(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[2048, 2048], set above the diagonal: the pattern that both operators slide along a causal diagonal."""
    return torch.ones(_MASK, _MASK, dtype=dtype, device=device).triu(1)


def _pages(token_table: torch.Tensor, request_rows: torch.Tensor, reach: int) -> torch.Tensor:
    """[N, pages] int32: the page of each 128 positions; a page's slots lie one after another."""
    first = token_table[:, :reach:PAGE][request_rows]
    return (first // PAGE).to(torch.int32)


def _check(q: torch.Tensor, parts: tuple[torch.Tensor, ...], latent: int) -> None:
    """Raises ValueError where queries and the flat cache [S, ...] do not fit together."""
    columns = sum(part.shape[-1] for part in parts)
    if q.dim() != 3 or q.shape[-1] != columns or parts[0].shape[-1] < latent:
        raise ValueError(
            f"paged_attention: queries {tuple(q.shape)} of which {latent} columns are latent do not fit a "
            f"cache of {' + '.join(str(part.shape[-1]) for part in parts)} columns"
        )
    if any(part.shape[0] % PAGE or part.dtype != q.dtype for part in parts):
        raise ValueError(
            f"paged_attention: a cache of {parts[0].shape[0]} slots in {parts[0].dtype} is not pages of "
            f"{PAGE} in {q.dtype}"
        )


@register(
    "mla.paged_attention",
    "torch_npu npu_fused_infer_attention_score_v2",
    preference=15,
    device=DEVICE,
    supports=fused_supports,
    host="each request's lengths, one copy a step",
)
def fused_infer_attention(
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
    lengths: HostLengths | None,
) -> torch.Tensor:
    """See `ascend.paged_attention`; lengths is asked once a call. Raises ValueError for operands that do not
    fit."""
    _check(q, cache, latent)
    if lengths is None:
        raise ValueError("paged_attention: fused-infer attention takes lengths from the host, and has none")
    rows, positions = lengths()
    if len(rows) != len(request_rows) or len(positions) != len(rows) or max(rows, default=0) > width:
        raise ValueError(f"paged_attention: {rows} new rows of {positions} for {len(request_rows)} requests")
    heads = q.shape[1]
    grid = Grid(cu_seqlens, q.shape[0], width)
    query = torch.nn.functional.pad(grid.spread(q), (0, 0, 0, padded_heads(heads) - heads)).transpose(1, 2)
    keys, ropes = (part.view(-1, 1, PAGE, part.shape[-1]) for part in cache)
    out, _ = operators().npu_fused_infer_attention_score_v2(
        query[..., :latent].contiguous(),
        keys,
        keys,
        query_rope=query[..., latent:].contiguous(),
        key_rope=ropes,
        atten_mask=_mask(q.device, torch.bool),
        actual_seq_qlen=rows,
        actual_seq_kvlen=positions,
        block_table=_pages(token_table, request_rows, reach),
        num_query_heads=query.shape[1],
        num_key_value_heads=1,
        softmax_scale=scale,
        input_layout="BNSD",
        sparse_mode=_RIGHT_DOWN_CAUSAL,
        block_size=PAGE,
    )
    return grid.gather(out.transpose(1, 2)[:, :, :heads])


@register(
    "mla.paged_attention",
    "CANN flash_mla_with_kvcache",
    preference=20,
    device=DEVICE,
    supports=flash_mla_supports,
)
def flash_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
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
    """See `ascend.paged_attention`, with the cache in one part, [S, latent + R]; lengths: not asked for."""
    _check(q, (cache,), latent)
    operator = package_operator("cann_ops_transformer", "cann_ops_transformer", "flash_mla_with_kvcache")
    plan = package_operator("cann_ops_transformer", "cann_ops_transformer", "flash_mla_with_kvcache_metadata")
    assert operator is not None and plan is not None
    tokens, heads, columns = q.shape
    padded = next(size for size in _MLA_HEADS if size >= heads)
    counts = cu_seqlens.diff().to(torch.int32)
    # The rows of padding lie behind the last request, of which seqused_q leaves them out.
    bounds = cu_seqlens.to(torch.int32).clone()
    bounds[-1] = tokens
    positions = (prefix_lens + counts).to(torch.int32)
    same = {"cu_seqlens_q": bounds, "seqused_q": counts, "layout_q": "TND"}
    same |= {"head_dim_v": latent, "mask_mode": _RIGHT_DOWN_CAUSAL}
    out, _ = operator(
        torch.nn.functional.pad(q, (0, 0, 0, padded - heads)),
        cache.view(-1, PAGE, 1, columns),
        block_table=_pages(token_table, request_rows, reach),
        cache_seqlens=positions,
        attn_mask=_mask(q.device, torch.int8),
        metadata=plan(positions, padded, 1, head_dim_qk=columns, **same),
        softmax_scale=scale,
        layout_kv="PA_BBND",
        layout_out="NTD",
        **same,
    )
    padding = torch.arange(tokens, device=q.device) >= cu_seqlens[-1]
    return out[:heads].transpose(0, 1).masked_fill(padding.view(-1, 1, 1), 0.0)
