"""Random lives of requests and cached states against what must hold after each step."""

from __future__ import annotations

import os
from array import array
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_k3.testing.loop import LoopFailed
from tests.prefix_cache.inside.fingerprint import FingerprintModel, fingerprint, follow

pytestmark = pytest.mark.skipif("K3_DRAFT" in os.environ, reason="the fingerprint model verifies no drafts")
SCHEDULES = int(os.environ.get("K3_SCHEDULES", "2000"))

LENGTHS = st.sampled_from((1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 80, 100, 130, 260))
TOKENS = st.one_of(st.integers(1, 70), st.sampled_from((130, 200)))
SEND = st.tuples(st.just("send"), st.integers(0, 2), LENGTHS, st.integers(0, 3), LENGTHS, TOKENS)
ACTIONS = st.one_of(
    SEND,
    SEND,
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("step"), st.integers(1, 70)),
    st.tuples(st.just("abort"), st.integers(0, 7)),
    st.tuples(st.just("retract")),
    st.tuples(st.just("evict states"), st.integers(1, 4)),
    st.tuples(st.just("evict tokens"), st.integers(1, 200)),
    st.tuples(st.just("refuse"), st.integers(1, 3)),
    st.tuples(st.just("lock"), st.integers(0, 2), LENGTHS),
)


def text(base: int) -> list[int]:
    return [(position * (base + 3) * 7 + base) % 1500 for position in range(300)]


class Life:
    """The loop, its model, and what runs on it."""

    def __init__(self, loop: Any, states: Any, model: FingerprintModel) -> None:
        self.loop, self.states, self.model = loop, states, model
        self.scheduler, self.cache = loop.scheduler, loop.scheduler.tree_cache
        self.pool = self.scheduler.req_to_token_pool
        self.running: dict[str, tuple[Any, list[int], int]] = {}
        self.leaving: list[Any] = []
        self.locks: list[Any] = []
        self.count = 0

    def act(self, kind: str, *rest: int) -> None:
        getattr(self, kind.replace(" ", "_"))(*rest)
        self.check()

    def send(self, base: int, length: int, other: int, fork: int, tokens: int) -> None:
        if len(self.running) == 8:
            return
        self.count += 1
        ids = text(base)[:length]
        if other and fork < length:
            ids = ids[:fork] + text(base + 10 * other)[: length - fork]
        name = f"life {self.count}"
        self.running[name] = (self.loop.admit(name, ids, tokens), ids, tokens)

    def step(self, turns: int) -> None:
        self.loop.step(turns)
        self.collect()

    def collect(self) -> None:
        for name, (request, ids, tokens) in list(self.running.items()):
            if request.finished():
                assert list(request.output_ids) == follow(ids, tokens)
                outcome = request.prefix_outcome
                assert outcome.hit <= len(ids) - 1
                del self.running[name]
        self.leaving = [request for request in self.leaving if self.slots_of(request)]

    def abort(self, index: int) -> None:
        if self.running:
            name = sorted(self.running)[index % len(self.running)]
            self.loop.abort(name)
            self.leaving.append(self.running.pop(name)[0])

    def retract(self) -> None:
        self.loop.retract()

    def evict_states(self, count: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(mamba_num=count))

    def evict_tokens(self, count: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=count))

    def refuse(self, nth: int) -> None:
        """The n-th allocation of state slots from now is refused, whoever asks."""
        allocator = self.pool.mamba_allocator
        left = [nth]

        def allocate(count: int) -> Any:
            left[0] -= 1
            if left[0] == 0:
                del allocator._do_alloc
                return None
            return type(allocator)._do_alloc(allocator, count)

        allocator._do_alloc = allocate

    def lock(self, base: int, length: int) -> None:
        """Hold what the tree has of a text for a while, as a reader does; the third lock frees the first."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", text(base)[:length]))))
        self.locks.append(self.cache.lock(found.last_device_node))
        if len(self.locks) > 2:
            self.cache.unlock(self.locks.pop(0))

    def check(self) -> None:
        """Every slot has one owner; every cached state is that of its own path."""
        allocator = self.pool.mamba_allocator
        free = allocator.free_slots.tolist()
        cached = self.cache.all_mamba_values_flatten().tolist()
        alive = [*(request for request, _, _ in self.running.values()), *self.leaving]
        owned = [slot for request in alive for slot in self.slots_of(request)]
        total = sorted([*free, *cached, *owned])
        assert total == list(range(1, allocator.size + 1)), f"{free=} {cached=} {owned=}"
        nodes = [(self.cache.root_node, [])]
        while nodes:
            node, path = nodes.pop()
            for child in node.children.values():
                tokens = [*path, *child.key.token_ids[: len(child.key)]]
                nodes.append((child, tokens))
                value = child.component_data[self.states.component_type].value
                if value is not None:
                    assert self.model.state(int(value[0])) == (len(tokens), fingerprint(tokens))

    @staticmethod
    def slots_of(request: Any) -> list[int]:
        kv = request.kv
        if kv is None or not kv.holds_kv:
            return []  # between two turns a waiting request has none, whatever it still names
        buffers = kv.mamba_ping_pong_track_buffer
        held = [] if buffers is None else [slot for slot in buffers.tolist() if slot >= 0]
        return held + ([int(kv.mamba_pool_idx)] if kv.holds_mamba else [])

    def clear(self) -> None:
        """Behind a failed check: the next schedule starts from nothing all the same."""
        self.pool.mamba_allocator.__dict__.pop("_do_alloc", None)
        while self.locks:
            self.cache.unlock(self.locks.pop())
        for name in self.running:
            self.loop.abort(name)
        self.loop.step(5)

    def end(self) -> None:
        self.pool.mamba_allocator.__dict__.pop("_do_alloc", None)
        while self.locks:
            self.cache.unlock(self.locks.pop())
        for _ in range(400):
            if not self.running and not self.leaving:
                break
            self.step(10)
        assert not self.running and not self.leaving, "a request was never served"
        self.check()


@pytest.fixture
def model(loop, monkeypatch):
    runner = loop.scheduler.tp_worker.model_runner
    made = FingerprintModel(runner)
    monkeypatch.setattr(runner.model, "forward", made)
    return made


@pytest.mark.parametrize("beside", range(4))
@pytest.mark.parametrize("end", range(4))
def test_a_prefill_between_two_steps_at_a_boundary(loop, states, model, beside, end):
    """Another request's prefill comes within some turns of the first boundary, and the request ends within
    some turns of the second: every state in the tree is that of its own key."""
    life = Life(loop, states, model)
    request = loop.admit("long", text(0)[:100], 150)
    life.running["long"] = request, text(0)[:100], 150
    while len(request.origin_input_ids) + len(request.output_ids) < 126 + beside:
        life.step(1)
    life.send(1, 40, 0, 0, 2)
    while len(request.origin_input_ids) + len(request.output_ids) < 190 + end:
        life.step(1)
        life.check()
    loop.abort("long")
    life.leaving.append(life.running.pop("long")[0])
    life.end()


def test_random_schedules(loop, states, model):
    @settings(
        max_examples=SCHEDULES, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(st.lists(ACTIONS, min_size=3, max_size=14))
    def run(actions: list[tuple]) -> None:
        if died:
            return  # the first schedule that ended the scheduler is the one to look at
        try:
            loop.flush()
            life = Life(loop, states, model)
            try:
                for kind, *rest in actions:
                    life.act(kind, *rest)
                life.end()
            except AssertionError:
                life.clear()
                raise
        except LoopFailed as failure:
            died.append(f"{failure} after {actions}")

    died: list[str] = []
    run()
    assert not died, died[0]
