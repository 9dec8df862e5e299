"""The router on a CPU, row by row in a fixed order."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from sglang_k3.kernels import registry
from sglang_k3.kernels.moe.reference import check_route
from sglang_k3.kernels.row_math import exp, float_rows, sigmoid
from sglang_k3.kernels.split import over_items

_ZERO = np.float32(0)
_NOTHING = np.float32(-np.inf)
_SUM_EPS = np.float32(1e-20)


@registry.register("moe.route", "numba_rows", preference=10, exact=True)
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
    """Arguments, result and errors as the reference."""
    check_route(logits, top_k, n_group, topk_group, activation)
    weights = torch.empty(logits.shape[0], top_k)
    ids = torch.empty(logits.shape[0], top_k, dtype=torch.int64)
    shift = torch.zeros(logits.shape[1]) if bias is None else bias.detach()
    group_votes = 1 if bias is None else 2
    over_items(
        _route,
        logits.shape[0],
        logits.numel() * top_k,
        float_rows(logits),
        float_rows(shift),
        activation == "sigmoid",
        n_group,
        topk_group,
        group_votes,
        renormalize,
        np.float32(scaling),
        weights.numpy(),
        ids.numpy(),
    )
    return weights, ids


@njit(cache=True, nogil=True, error_model="numpy")
def _softmax(logits: np.ndarray, scores: np.ndarray) -> None:
    top = _NOTHING
    for e in range(logits.shape[0]):
        top = max(top, logits[e])
    total = _ZERO
    for e in range(logits.shape[0]):
        scores[e] = exp(logits[e] - top)
        total += scores[e]
    for e in range(logits.shape[0]):
        scores[e] /= total


@njit(cache=True, nogil=True, error_model="numpy")
def _mark_best(choice: np.ndarray, count: int, chosen: np.ndarray) -> None:
    """Set `chosen` at the `count` largest; among equals, and where nothing compares, at the lowest index."""
    chosen[:] = False
    for _ in range(count):
        best = -1
        for e in range(choice.shape[0]):
            if not chosen[e] and (best < 0 or choice[e] > choice[best]):
                best = e
        chosen[best] = True


@njit(cache=True, nogil=True, error_model="numpy")
def _drop_groups(choice: np.ndarray, groups: int, kept: int, votes: int) -> None:
    """Set to -inf all groups but the `kept` best by the sum of their `votes` largest entries."""
    size = choice.shape[0] // groups
    worth = np.zeros(groups, np.float32)
    voter = np.empty(size, np.bool_)
    for g in range(groups):
        group = choice[g * size : (g + 1) * size]
        _mark_best(group, min(votes, size), voter)
        for e in range(size):
            if voter[e]:
                worth[g] += group[e]
    keep = np.empty(groups, np.bool_)
    _mark_best(worth, kept, keep)
    for e in range(choice.shape[0]):
        if not keep[e // size]:
            choice[e] = _NOTHING


@njit(cache=True, nogil=True, error_model="numpy")
def _route(
    first: int,
    last: int,
    logits: np.ndarray,
    bias: np.ndarray,
    use_sigmoid: bool,
    groups: int,
    kept_groups: int,
    votes: int,
    renormalize: bool,
    scaling: np.float32,
    weights: np.ndarray,
    ids: np.ndarray,
) -> None:
    experts, top_k = logits.shape[1], ids.shape[1]
    for t in range(first, last):
        scores = np.empty(experts, np.float32)
        if use_sigmoid:
            for e in range(experts):
                scores[e] = sigmoid(logits[t, e])
        else:
            _softmax(logits[t], scores)
        choice = scores + bias
        if groups > 1:
            _drop_groups(choice, groups, kept_groups, votes)
        chosen = np.empty(experts, np.bool_)
        _mark_best(choice, top_k, chosen)
        total = _ZERO
        slot = 0
        for e in range(experts):
            if chosen[e]:
                ids[t, slot] = e
                weights[t, slot] = scores[e]
                total += scores[e]
                slot += 1
        for k in range(top_k):
            if renormalize:
                weights[t, k] /= total + _SUM_EPS
            weights[t, k] *= scaling
