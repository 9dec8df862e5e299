"""Probes do the work they are credited with, and leave what they walk over as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.probes import BLOCK, copy, matmul_probe, memory_probe, read, stream


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 5, 40 * BLOCK + 1])
def test_read_sums_every_word(size: int):
    words = np.random.default_rng(0).integers(0, 1 << 32, size, dtype=np.uint32)
    assert read(words) == int(words.sum(dtype=np.uint64)) % (1 << 32)


@pytest.mark.parametrize("size", [1, BLOCK, 40 * BLOCK + 1])
def test_copy_writes_every_word(size: int):
    words = np.random.default_rng(0).integers(0, 1 << 32, size, dtype=np.uint32)
    out = np.zeros_like(words)
    copy(words, out)
    assert np.array_equal(out, words)


@pytest.mark.parametrize("dtype", [np.float32, np.uint32])
def test_stream_changes_nothing(dtype):
    numbers = (np.random.default_rng(0).standard_normal(40 * BLOCK + 1) * 1000).astype(np.int32).astype(dtype)
    kept = numbers.copy()
    stream(numbers)
    assert np.array_equal(numbers, kept)


def test_stream_really_writes():
    # Not a number is the one value that times one plus zero may not keep: a write shows in its bits.
    signalling = np.full(4 * BLOCK, 0x7F800001, np.uint32)
    stream(signalling.view(np.float32))
    assert (signalling == 0x7FC00001).all()


@pytest.mark.parametrize(("name", "times"), [("stream", 2), ("copy", 2), ("read", 1)])
def test_a_memory_probe_counts_the_bytes_of_its_portion(name: str, times: int):
    slab = torch.zeros(1000, dtype=torch.uint8)
    assert memory_probe(name, slab, True, 256).work == times * 256
    assert memory_probe(name, slab, True, 1 << 20).work == times * 1000


def test_portions_walk_through_the_slab_before_one_comes_again(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    monkeypatch.setattr("benchmarks.probes.stream", lambda flat: seen.append(flat.ctypes.data))
    slab = torch.zeros(1024, dtype=torch.uint8)
    probe = memory_probe("stream", slab, True, 256)
    for _ in range(5):
        probe.call()
    assert [address - slab.data_ptr() for address in seen] == [0, 256, 512, 768, 0]


def test_packed_bytes_survive_the_stream():
    slab = torch.arange(256, dtype=torch.uint8).repeat(64)
    kept = slab.clone()
    memory_probe("stream", slab, False, 1 << 20).call()
    assert torch.equal(slab, kept)


def test_unknown_memory_probe_is_named():
    with pytest.raises(ValueError, match="'triad'; known: stream, copy, read"):
        memory_probe("triad", torch.zeros(64, dtype=torch.uint8), True, 64)


def test_matmul_probe_counts_a_square_product():
    probe = matmul_probe("matmul_fp32", 32)
    assert probe.work == 65_536
    result = probe.call()
    assert isinstance(result, torch.Tensor) and result.shape == (32, 32) and result.abs().sum() > 0
