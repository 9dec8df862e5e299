"""Attention-residual mixes on a CPU: token by token, in one pass over the rows it reads.

Each token's sums run in a fixed order (bank rows first to last, the running sum at the end), so these
serve the exact mode too. `mix` and block_prepare + merge_partial agree to rounding, not bit for bit:
a model uses one of them throughout.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from sglang_k3.kernels import registry
from sglang_k3.kernels.attention_residual.summary import Summary
from sglang_k3.kernels.rms_norm.cpu import rms_norm
from sglang_k3.kernels.row_math import dot, exp, float_rows, fp32_or_bf16
from sglang_k3.kernels.split import over_items

_ZERO = np.float32(0)
_ONE = np.float32(1)
_NOTHING = np.float32(-np.inf)


@registry.register("attention_residual.mix", "numba", preference=10, exact=True, supports=fp32_or_bf16)
def mix(partial: torch.Tensor, bank: torch.Tensor, key_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """partial [T, D], bank [n, T, D], key_weight [D] fp32 -> [T, D] in partial's dtype."""
    out = torch.empty(partial.shape, dtype=torch.float32)
    over_items(
        _mix,
        partial.shape[0],
        partial.numel() + bank.numel(),
        float_rows(partial),
        float_rows(bank),
        float_rows(key_weight),
        np.float32(eps),
        out.numpy(),
    )
    return out.to(partial.dtype)


@registry.register(
    "attention_residual.block_prepare", "numba", preference=10, exact=True, supports=fp32_or_bf16
)
def block_prepare(bank: torch.Tensor, key_weights: torch.Tensor, eps: float) -> Summary:
    """bank [n, T, D], key_weights [M, D] fp32 -> Summary of the M mixes over the bank."""
    mixes, tokens, width = key_weights.shape[0], bank.shape[1], bank.shape[2]
    summary = Summary(
        torch.zeros(mixes, tokens, width),
        torch.full((mixes, tokens), float("-inf")),
        torch.zeros(mixes, tokens),
    )
    over_items(
        _prepare,
        tokens,
        bank.numel() * mixes,
        float_rows(bank),
        float_rows(key_weights),
        np.float32(eps),
        *(field.numpy() for field in summary),
    )
    return summary


@registry.register(
    "attention_residual.merge_partial", "numba", preference=10, exact=True, supports=fp32_or_bf16
)
def merge_partial(
    partial: torch.Tensor,
    acc: torch.Tensor,
    maximum: torch.Tensor,
    total: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """One mix of a Summary (acc [T, D], maximum [T], total [T]) joined by partial [T, D] -> [T, D]."""
    out = torch.empty(partial.shape, dtype=torch.float32)
    rows, weight = float_rows(partial), float_rows(key_weight)
    acc_rows, tops, totals = (float_rows(field) for field in (acc, maximum, total))
    over_items(
        _merge,
        partial.shape[0],
        partial.numel(),
        rows,
        acc_rows,
        tops,
        totals,
        weight,
        np.float32(eps),
        out.numpy(),
    )
    return out.to(partial.dtype)


# With the next norm: an NPU saves a pass over memory by it; here they are their two parts.


@registry.register(
    "attention_residual.mix_norm", "numba", preference=10, exact=True, supports=fp32_or_bf16, composed=True
)
def mix_norm(
    partial: torch.Tensor,
    bank: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    norm_weight: torch.Tensor,
    norm_eps: float,
) -> torch.Tensor:
    """See `reference.mix_norm`."""
    return rms_norm(mix(partial, bank, key_weight, eps), norm_weight, norm_eps)


@registry.register(
    "attention_residual.merge_norm", "numba", preference=10, exact=True, supports=fp32_or_bf16, composed=True
)
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
    return rms_norm(merge_partial(partial, acc, maximum, total, key_weight, eps), norm_weight, norm_eps)


@njit(cache=True, nogil=True, error_model="numpy")
def _inverse_rms(row: np.ndarray, eps: np.float32) -> np.float32:
    return _ONE / np.sqrt(dot(row, row) / np.float32(row.shape[0]) + eps)


@njit(cache=True, nogil=True, error_model="numpy")
def _score(row: np.ndarray, key_weight: np.ndarray, eps: np.float32) -> np.float32:
    return dot(row, key_weight) * _inverse_rms(row, eps)


@njit(cache=True, nogil=True, error_model="numpy")
def _add(out: np.ndarray, share: np.float32, row: np.ndarray) -> None:
    for d in range(out.shape[0]):
        out[d] += share * row[d]


@njit(cache=True, nogil=True, error_model="numpy")
def _mix(
    first: int,
    last: int,
    partial: np.ndarray,
    bank: np.ndarray,
    key_weight: np.ndarray,
    eps: np.float32,
    out: np.ndarray,
) -> None:
    count = bank.shape[0]
    for t in range(first, last):
        if count == 0:
            out[t] = partial[t]
            continue
        scores = np.empty(count + 1, np.float32)
        for j in range(count):
            scores[j] = _score(bank[j, t], key_weight, eps)
        scores[count] = _score(partial[t], key_weight, eps)
        top = _NOTHING
        for j in range(count + 1):
            top = max(top, scores[j])
        row = out[t]
        row[:] = _ZERO
        total = _ZERO
        for j in range(count + 1):
            share = exp(scores[j] - top)
            total += share
            _add(row, share, bank[j, t] if j < count else partial[t])
        for d in range(row.shape[0]):
            row[d] /= total


@njit(cache=True, nogil=True, error_model="numpy")
def _prepare(
    first: int,
    last: int,
    bank: np.ndarray,
    key_weights: np.ndarray,
    eps: np.float32,
    acc: np.ndarray,
    maximum: np.ndarray,
    total: np.ndarray,
) -> None:
    count, mixes = bank.shape[0], key_weights.shape[0]
    for t in range(first, last):
        inverses = np.empty(count, np.float32)
        for j in range(count):
            inverses[j] = _inverse_rms(bank[j, t], eps)
        scores = np.empty(count, np.float32)
        for m in range(mixes):
            top = _NOTHING
            for j in range(count):
                scores[j] = dot(bank[j, t], key_weights[m]) * inverses[j]
                top = max(top, scores[j])
            maximum[m, t] = top
            for j in range(count):
                share = exp(scores[j] - top)
                total[m, t] += share
                _add(acc[m, t], share, bank[j, t])


@njit(cache=True, nogil=True, error_model="numpy")
def _merge(
    first: int,
    last: int,
    partial: np.ndarray,
    acc: np.ndarray,
    maximum: np.ndarray,
    total: np.ndarray,
    key_weight: np.ndarray,
    eps: np.float32,
    out: np.ndarray,
) -> None:
    for t in range(first, last):
        score = _score(partial[t], key_weight, eps)
        top = max(maximum[t], score)
        bank_share = exp(maximum[t] - top)
        row_share = exp(score - top)
        whole = total[t] * bank_share + row_share
        for d in range(partial.shape[1]):
            out[t, d] = (acc[t, d] * bank_share + partial[t, d] * row_share) / whole
