"""Tiers (e) and (d). Streams that run as late as they legally may: tokens must not change, and a wait that is
left out must be noticed. And torch_npu's own stream sanitizer over the same requests.

Not proven here: the order of memory inside a stream, collectives, graphs, or that torch_npu's own allocator
orders what a real device needs ordered.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.npu import workload
from tests.npu.sanitizer import watching

SEEDS = range(10)

npu: Any = torch.get_device_module("npu")
NEW_TOKENS = 5


@pytest.fixture(scope="module")
def loop(speculating) -> Any:
    return speculating


@pytest.fixture(scope="module")
def asked(model: str) -> list[list[int]]:
    return [ids[:40] for ids in workload.prompts(model)[:6:5]]


def run(loop, asked: list[list[int]], name: str) -> list[list[int]]:
    requests = [loop.admit(f"{name}-{n}", ids, NEW_TOKENS) for n, ids in enumerate(asked)]
    loop.finish(*requests)
    return workload.tokens(requests)


@pytest.fixture(scope="module")
def at_once(loop, asked) -> list[list[int]]:
    return run(loop, asked, "at-once")


def test_a_missing_wait_between_two_streams_is_a_race(emulator):
    side = npu.Stream()
    for waits, races in ((True, 0), (False, 1)):
        with emulator.held_back(0) as streams:
            x = torch.zeros(4, device="npu")
            with npu.stream(side):
                if waits:
                    side.wait_stream(npu.default_stream())
                y = x + 1
            npu.current_stream().wait_stream(side)
            got = (y * 2).cpu()
        assert len(streams.races) == races
        if waits:
            assert got.tolist() == [2.0] * 4


def test_work_runs_when_it_is_waited_for_and_not_before(emulator):
    with emulator.held_back(0):
        x = torch.ones(3, device="npu")
        pinned = torch.zeros(3, pin_memory=True)
        pinned.copy_(x, non_blocking=True)
        done = npu.Event()
        done.record()
        assert not done.query() and pinned.tolist() == [0.0] * 3
        done.synchronize()
        assert done.query() and pinned.tolist() == [1.0] * 3


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_do_not_depend_on_the_order_of_streams(loop, emulator, asked, at_once, seed):
    with emulator.held_back(seed) as streams:
        got = run(loop, asked, f"seed-{seed}")
    assert got == at_once
    assert streams.races == []


def test_every_wait_between_streams_is_needed(loop, emulator, asked, at_once, capsys):
    """Each line of code that makes one stream wait for another is left out."""
    with emulator.held_back(0) as streams:
        run(loop, asked, "count")
    lines = list(dict.fromkeys(streams.waits))
    assert lines
    noticed: dict[str, str] = {}
    for number, line in enumerate(lines):
        with emulator.held_back(0, drop=line) as without:
            assert run(loop, asked, f"drop-{number}") == at_once
        if without.races:
            noticed[line] = without.races[0]
    with capsys.disabled():
        for line in lines:
            print(f"\nleft out: {line}: {noticed.get(line, 'NOT NOTICED')}", end="")
    # With drafts the host waits for a verify's lengths before the scheduler writes its tables again, so that
    # barrier orders nothing more; without drafts it does (cases_decode.py).
    assert set(noticed) == {line for line in lines if "_apply_war_barrier" not in line}


def test_torch_npus_own_sanitizer_finds_no_race(loop, asked, at_once):
    with watching(loop) as reports:
        assert run(loop, asked, "watched") == at_once
    assert reports.launches > 5000
    assert reports.races == [] and reports.unrecorded == []


def test_the_sanitizer_finds_races_where_no_wait_is_heard(loop, asked):
    with watching(loop, deaf=True) as reports:
        run(loop, asked, "deaf")
    assert len(reports.races) > 50 and any("ascend" in race for race in reports.races)
