"""Oracles of the router and of the routed experts."""

from __future__ import annotations

import torch

from sglang_k3.kernels import registry
from sglang_k3.kernels.activation.reference import gated
from sglang_k3.kernels.mx.reference import dequantize_mxfp4


@registry.register("moe.route", "reference", preference=0, device="any")
def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    scaling: float,
    n_group: int,
    topk_group: int,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] fp32, bias [E] fp32 or None -> weights [T, top_k] fp32, ids [T, top_k] i64 ascending.

    The scores are sigmoid or softmax of the logits. The bias takes part in the selection only (arXiv
    2408.15664); of n_group equal groups the topk_group best are kept, a group's worth being the sum of
    its two best biased scores, or its best score where there is no bias (arXiv 2412.19437). Equal
    scores, and equal groups, go to the lower index. Weights are scores, divided by their sum + 1e-20
    when `renormalize`, times `scaling`. Raises ValueError for another activation or sizes that do not
    fit.
    """
    check_route(logits, top_k, n_group, topk_group, activation)
    scores = torch.sigmoid(logits) if activation == "sigmoid" else torch.softmax(logits, dim=-1)
    choice = scores if bias is None else scores + bias
    if n_group > 1:
        grouped = choice.unflatten(-1, (n_group, -1))
        best = grouped.topk(1 if bias is None else min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, _first_best(best, topk_group), True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    ids = _first_best(choice, top_k).sort(dim=-1).values
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, ids


def check_route(logits: torch.Tensor, top_k: int, n_group: int, topk_group: int, activation: str) -> None:
    """Raises ValueError where a router's sizes do not fit or its activation is unknown."""
    experts = logits.shape[1]
    if activation not in ("sigmoid", "softmax"):
        raise ValueError(f"router activation must be sigmoid or softmax, not {activation!r}")
    if n_group < 1 or experts % n_group or not 1 <= topk_group <= n_group:
        raise ValueError(f"{experts} experts cannot form {n_group} groups of which {topk_group} are kept")
    if not 1 <= top_k <= experts // n_group * topk_group:
        raise ValueError(f"top_k = {top_k} of the {experts // n_group * topk_group} experts in kept groups")


def _first_best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest along the last axis; among equals the lower index first."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


@registry.register("moe.experts", "reference", preference=0, device="any")
def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    beta: float | None,
    linear_beta: float | None,
    first_expert: int = 0,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' outputs -> [T, D] in x's dtype.

    x [T, D]; ids [T, k] i64 and weights [T, k] fp32 of the chosen experts; w13 [E, 2I, D] gate rows then
    up rows; w2 [E, D, I]; betas as in activation.gated. Expert e of the weights has the id
    first_expert + e; other ids are computed elsewhere and add nothing. Sums in fp32, in ascending id
    order, one cast at the end.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(x.shape, dtype=wide, device=x.device)
    for expert in range(w13.shape[0]):
        token, choice = torch.where(ids == first_expert + expert)
        hidden = gated(x[token].to(wide) @ w13[expert].to(wide).T, beta, linear_beta)
        total[token] += weights[token, choice].to(wide).unsqueeze(1) * (hidden @ w2[expert].to(wide).T)
    return total.to(x.dtype)


@registry.register("moe.experts_mxfp4", "reference", preference=0, device="any")
def experts_mxfp4(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13_packed: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_packed: torch.Tensor,
    w2_scale: torch.Tensor,
    beta: float | None,
    linear_beta: float | None,
    first_expert: int = 0,
) -> torch.Tensor:
    """moe.experts with weights in MXFP4: packed [E, R, C/2] u8 and scale [E, R, C/32] u8 for each."""
    wide = torch.promote_types(x.dtype, torch.float32)
    w13, w2 = (
        dequantize_mxfp4(packed.flatten(0, 1), scale.flatten(0, 1), wide).unflatten(0, packed.shape[:2])
        for packed, scale in ((w13_packed, w13_scale), (w2_packed, w2_scale))
    )
    return experts(x, ids, weights, w13, w2, beta, linear_beta, first_expert)
