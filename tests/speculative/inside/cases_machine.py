"""Random lives of requests against a model of the pools: nothing leaks, nothing is owned twice, texts are
right."""

from __future__ import annotations

import random
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_k3.speculative.acceptance import Accepted
from tests.speculative.inside.at_random import AtRandom

_ALONE: dict[tuple, list[int]] = {}
LENGTHS = (1, 17, 63, 64, 65, 130)


def ids_of(length: int, seed: int) -> list[int]:
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(1500) for _ in range(length)]


class Lives(RuleBasedStateMachine):
    loop: Any

    @initialize()
    def empty(self) -> None:
        self.requests: dict[str, tuple[Any, tuple]] = {}
        self.count = 0
        self.loop.worker.__dict__.pop("_accept", None)
        self.loop.flush()
        pool = self.loop.scheduler.req_to_token_pool
        self.free = len(pool.free_slots), pool.mamba_allocator.available_size()

    @rule(length=st.sampled_from(LENGTHS), seed=st.integers(0, 2), tokens=st.integers(1, 40))
    @precondition(lambda self: len(self.requests) < 9)
    def admit(self, length: int, seed: int, tokens: int) -> None:
        self.count += 1
        # SGLang aborts every request whose name begins with the one it is told.
        name = f"life {self.count:03d}"
        request = self.loop.admit(name, ids_of(length, seed), tokens)
        self.requests[name] = (request, (length, seed, tokens))

    @rule(turns=st.integers(1, 6))
    def step(self, turns: int) -> None:
        self.loop.step(turns)

    @rule(turns=st.integers(1, 5), seed=st.integers(0, 99))
    def step_accepting_at_random(self, turns: int, seed: int) -> None:
        """Fewer drafts than are right may be accepted at any time; never wrong ones."""
        worker, draw = self.loop.worker, torch.Generator().manual_seed(seed)
        honest = type(worker)._accept

        def accept(*arguments: Any) -> Accepted:
            found = honest(worker, *arguments)
            fewer = torch.randint(1, 9, found.counts.shape, generator=draw)
            return found.limited(fewer)

        worker._accept = accept
        self.loop.step(turns)
        del worker._accept

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.loop.abort(name)
        del self.requests[name]

    @rule()
    def retract(self) -> None:
        self.loop.retract()

    @invariant()
    def rows_and_slots_have_one_owner(self) -> None:
        if not hasattr(self, "requests"):
            return
        pool = self.loop.scheduler.req_to_token_pool
        running = [r for r, _ in self.requests.values() if r.kv is not None and r.kv.req_pool_idx is not None]
        rows = [int(r.kv.req_pool_idx) for r in running]
        slots = [int(r.kv.mamba_pool_idx) for r in running if r.kv.mamba_pool_idx is not None]
        assert len(set(rows)) == len(rows) and 0 not in rows
        assert len(set(slots)) == len(slots) and 0 not in slots
        assert not set(rows) & set(pool.free_slots)
        free = pool.mamba_allocator.free_slots
        assert not set(slots) & set(free.tolist() if isinstance(free, torch.Tensor) else free)

    def teardown(self) -> None:
        if not hasattr(self, "requests"):
            return
        self.loop.finish(*(request for request, _ in self.requests.values()))
        written = {name: list(request.output_ids) for name, (request, _) in self.requests.items()}
        self.loop.flush()
        pool = self.loop.scheduler.req_to_token_pool
        assert (len(pool.free_slots), pool.mamba_allocator.available_size()) == self.free, (
            "a row or slot leaked"
        )
        assert not pool.mamba_pool.records.verified.any(), "records outlived their step"
        for name, (_, key) in self.requests.items():
            if key not in _ALONE:
                length, seed, tokens = key
                alone = self.loop.admit(f"alone {key}", ids_of(length, seed), tokens)
                self.loop.finish(alone)
                self.loop.flush()
                _ALONE[key] = list(alone.output_ids)
            assert written[name] == _ALONE[key]


def test_random_lives(loop, request):
    Lives.loop = loop
    loop.worker._planner.budget = AtRandom(seed=7)
    run_state_machine_as_test(
        Lives, settings=settings(max_examples=6, stateful_step_count=25, deadline=None, print_blob=True)
    )
