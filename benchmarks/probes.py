"""What this machine can do: memory streams over given tensors, and matrix products.

The memory loops are compiled and split over threads exactly as the kernels' are (kernels/split.py). The
in-place stream multiplies by one and adds zero, both unknown to the compiler, so what it walks over keeps its
values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit

from sglang_k3.kernels.split import over_items

BLOCK = 1 << 14
"""Elements a thread takes at a time."""

MEMORY_PROBES = ("stream", "copy", "read")
MATMUL_PROBES = ("matmul_fp32", "matmul_bf16")


@dataclass(frozen=True)
class Probe:
    """One call does `work` bytes or operations."""

    name: str
    work: int
    call: Callable[[], object]


@njit(cache=True, nogil=True, error_model="numpy")
def _scale_and_shift(part, factor, shift) -> None:
    for i in range(part.shape[0]):
        part[i] = part[i] * factor + shift


@njit(cache=True, nogil=True, error_model="numpy")
def _stream(first, last, flat, block, factor, shift) -> None:
    _scale_and_shift(flat[first * block : min(last * block, flat.shape[0])], factor, shift)


@njit(cache=True, nogil=True, error_model="numpy")
def _copy_part(part, out) -> None:
    for i in range(part.shape[0]):
        out[i] = part[i]


@njit(cache=True, nogil=True, error_model="numpy")
def _copy(first, last, flat, out, block) -> None:
    end = min(last * block, flat.shape[0])
    _copy_part(flat[first * block : end], out[first * block : end])


@njit(cache=True, nogil=True, error_model="numpy")
def _sum_part(part):
    total = np.uint32(0)
    for i in range(part.shape[0]):
        total += part[i]
    return total


@njit(cache=True, nogil=True, error_model="numpy")
def _read(first, last, flat, block, sums) -> None:
    # Integers, because their sums may be reordered, and so vectorised.
    for b in range(first, last):
        sums[b] = _sum_part(flat[b * block : min((b + 1) * block, flat.shape[0])])


def _blocks(flat: np.ndarray) -> int:
    return -(-flat.shape[0] // BLOCK)


def stream(flat: np.ndarray) -> None:
    """Read and write back every element of flat [n] (fp32 or uint32), unchanged."""
    one, zero = flat.dtype.type(1), flat.dtype.type(0)
    over_items(_stream, _blocks(flat), flat.shape[0], flat, BLOCK, one, zero)


def copy(flat: np.ndarray, out: np.ndarray) -> None:
    """out [n] = flat [n], both of one dtype."""
    over_items(_copy, _blocks(flat), flat.shape[0], flat, out, BLOCK)


def read(flat: np.ndarray) -> int:
    """The sum modulo 2^32 of flat [n] uint32."""
    sums = np.zeros(_blocks(flat), np.uint32)
    over_items(_read, _blocks(flat), flat.shape[0], flat, BLOCK, sums)
    return int(sums.sum(dtype=np.uint64)) % (1 << 32)


class _Portions:
    """Equal neighbouring parts of an array in turn, so that a probe comes back to a part last of all."""

    def __init__(self, flat: np.ndarray, elements: int) -> None:
        size = min(elements, flat.shape[0])
        starts = range(0, flat.shape[0] - size + 1, size)
        self.bounds = [(start, start + size) for start in starts]
        self.bytes = size * flat.itemsize
        self._turn = 0

    def next(self) -> tuple[int, int]:
        bounds = self.bounds[self._turn]
        self._turn = (self._turn + 1) % len(self.bounds)
        return bounds


def memory_probe(name: str, slab: torch.Tensor, floats: bool, portion: int) -> Probe:
    """A probe that walks over `slab` (uint8 [bytes]), `portion` bytes a call, and leaves its values alone.

    stream counts its bytes twice (read and written), and moves fp32 where `floats`, else 32-bit integers
    (arbitrary bits read as floats would hold NaN, which a product may change); copy, into a second slab of
    the same size, counts them twice too; read counts them once.
    """
    words = slab[: slab.numel() // 4 * 4].view(torch.float32 if floats else torch.uint32).numpy()
    portions = _Portions(words, portion // 4)
    if name == "stream":

        def run_stream() -> None:
            begin, end = portions.next()
            stream(words[begin:end])

        return Probe(name, 2 * portions.bytes, run_stream)
    integers = words.view(np.uint32)
    if name == "read":

        def run_read() -> int:
            begin, end = portions.next()
            return read(integers[begin:end])

        return Probe(name, portions.bytes, run_read)
    if name != "copy":
        raise ValueError(f"unknown memory probe {name!r}; known: {', '.join(MEMORY_PROBES)}")
    target = integers.copy()  # touched, so that the probe pays no page faults

    def run_copy() -> None:
        begin, end = portions.next()
        copy(integers[begin:end], target[begin:end])

    return Probe(name, 2 * portions.bytes, run_copy)


def matmul_probe(name: str, size: int) -> Probe:
    """A square torch product of `size`, in fp32 or bf16.

    Without bf16 instructions a bf16 product is a hundred times slower, so a quarter of the size is plenty.
    """
    if name == "matmul_bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        size //= 4
    dtype = {"matmul_fp32": torch.float32, "matmul_bf16": torch.bfloat16}[name]
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype)
    return Probe(name, 2 * size**3, lambda: torch.mm(a, b, out=out))
