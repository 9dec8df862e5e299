"""How many threads a piece of work gets: compiled kernels over independent items, and torch's products.

No prange: numba compiles its body several times over (19 s instead of 6 for the chunked prefill), and its
threads compete with torch's. Kernels release the GIL, so plain Python threads do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise

import torch

_WORTH_THREADS = 1 << 19
_WORTH_TORCH_THREADS = 80_000_000
"""Floating-point operations of a product from which torch's other threads gain more than waking them costs:
0.1 to 0.3 ms a call where they sleep in between (OMP_WAIT_POLICY=PASSIVE), against 0.3 us for the switch."""


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Helper threads of this process; a forked child makes its own, because it inherits none."""
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix=f"k3-kernel-{process}")


def over_items(kernel: Callable[..., None], items: int, work: int, *arguments: object) -> None:
    """kernel(first, last, *arguments) over contiguous parts of range(items), the first on this thread.

    As many parts as torch has threads, or one where fewer than 524,288 numbers (`work`) are handled one by
    one (products of whole vectors count an eighth): waking a thread costs 0.1 ms and more. The kernel
    must be nogil, and give each item the same result whatever part it is in. Raises what the kernel raises.
    """
    parts = min(torch.get_num_threads(), items) if work >= _WORTH_THREADS else 1
    if parts <= 1:
        kernel(0, items, *arguments)
        return
    bounds = [items * part // parts for part in range(parts + 1)]
    pool = _pool(os.getpid())
    helpers = [pool.submit(kernel, first, last, *arguments) for first, last in pairwise(bounds[1:])]
    kernel(bounds[0], bounds[1], *arguments)
    for helper in helpers:
        helper.result()


@contextmanager
def threads_for(operations: int) -> Iterator[None]:
    """torch runs on one thread inside, unless a product of so many operations is worth more."""
    threads = torch.get_num_threads()
    if operations >= _WORTH_TORCH_THREADS or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
