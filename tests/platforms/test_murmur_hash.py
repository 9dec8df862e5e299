"""The noise of seeded sampling is MurmurHash3, as on every other device."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import pytest
import torch

from sglang_k3.platforms.murmur_hash import murmur_hash32

SEEDS = [0, 1, 42, (1 << 32) - 1, 1 << 32, (1 << 63) - 1]
POSITIONS = [0, 1, 15, 4096, 131_071, 7]
COLUMNS = [0, 1, 2, 255, 2047, 163_839]


def murmur3(data: bytes, seed: int = 0) -> int:
    """The published algorithm, in Python's integers, for whole words."""

    def turn(x: int, places: int) -> int:
        return ((x << places) | (x >> (32 - places))) & 0xFFFFFFFF

    h = seed
    for (word,) in struct.iter_unpack("<I", data):
        k = turn(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        h = (turn(h ^ k, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= len(data)
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        h = (h ^ (h >> shift)) * multiplier & 0xFFFFFFFF
    return h ^ (h >> 16)


def test_the_check_itself_gives_the_published_values():
    assert murmur3(b"") == 0 and murmur3(b"", 1) == 0x514E28B7
    assert murmur3(b"test") == 0xBA6BD213
    assert murmur3(b"test", 0x9747B28C) == 0x704B81DC


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_each_value_is_the_hash_of_seed_position_and_column(dtype):
    got = murmur_hash32(torch.tensor(SEEDS).to(dtype), torch.tensor(POSITIONS), torch.tensor(COLUMNS))
    assert got.dtype == torch.uint32
    for row, (seed, position) in enumerate(zip(SEEDS, POSITIONS, strict=True)):
        for column, value in enumerate(COLUMNS):
            assert got[row, column].item() == murmur3(struct.pack("<QII", seed, position, value))


def test_no_rows_are_no_noise():
    empty = torch.empty(0, dtype=torch.int64)
    assert murmur_hash32(empty, empty, torch.arange(7)).shape == (0, 7)


def test_sglangs_own_kernel_gives_the_same():
    """In Triton's interpreter, which has to be chosen before Triton is imported."""
    program = (
        "import torch\n"
        "from sglang.kernels.ops.sampling import murmur_hash as theirs\n"
        "from sglang_k3.platforms.murmur_hash import murmur_hash32\n"
        "seed, at = torch.tensor([0, 5, 2**40 + 3]), torch.tensor([1, 2, 70000])\n"
        "cols = torch.arange(1500)\n"
        "out = torch.empty(3, 1500, dtype=torch.uint32)\n"
        "theirs.murmur_hash32_kernel[(3, 2)](seed, at, cols, out, 3, 1500, BLOCK_SIZE=1024)\n"
        "print('SAME', torch.equal(out, murmur_hash32(seed, at, cols)))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "SAME True" in run.stdout, run.stdout + run.stderr[-2000:]
