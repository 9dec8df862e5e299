"""The noise of seeded sampling on a plain CPU: SGLang has it as a Triton kernel, and for CPUs in its own
build.

MurmurHash3 (32 bits, seed 0; Austin Appleby, public domain) of four little-endian words: the request's
seed, low half first, the token's position, and the vocabulary column.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from sglang_k3.kernels.split import over_items

_BYTES = np.uint32(16)
_ADD = np.uint32(0xE6546B64)
_FIVE = np.uint32(5)
_FIRST, _SECOND = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_END_1, _END_2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


@njit(cache=True, nogil=True, error_model="numpy")
def _turn(x, places):
    return np.uint32((x << np.uint32(places)) | (x >> np.uint32(32 - places)))


@njit(cache=True, nogil=True, error_model="numpy")
def _mix(h, word):
    h = np.uint32(h ^ np.uint32(_turn(np.uint32(word * _FIRST), 15) * _SECOND))
    return np.uint32(_turn(h, 13) * _FIVE + _ADD)


@njit(cache=True, nogil=True, error_model="numpy")
def _end(h):
    h = np.uint32(h ^ _BYTES)
    h = np.uint32((h ^ (h >> np.uint32(16))) * _END_1)
    h = np.uint32((h ^ (h >> np.uint32(13))) * _END_2)
    return np.uint32(h ^ (h >> np.uint32(16)))


@njit(cache=True, nogil=True, error_model="numpy")
def _hash(first, last, seeds, positions, columns, out) -> None:
    for row in range(first, last):
        h = _mix(np.uint32(0), np.uint32(seeds[row] & np.uint64(0xFFFFFFFF)))
        h = _mix(h, np.uint32(seeds[row] >> np.uint64(32)))
        h = _mix(h, np.uint32(positions[row]))
        for c in range(columns.shape[0]):
            out[row, c] = _end(_mix(h, np.uint32(columns[c])))


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """seed [N] uint64 (or int64), positions [N], col_indices [M] integers -> [N, M] uint32."""
    out = torch.empty(seed.shape[0], col_indices.shape[0], dtype=torch.uint32)
    seeds = seed.contiguous().numpy().view(np.uint64)
    over_items(_hash, seeds.shape[0], out.numel(), seeds, positions.numpy(), col_indices.numpy(), out.numpy())
    return out
