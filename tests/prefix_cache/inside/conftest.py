"""One scheduler for all cases of a process: SGLang keeps one configuration a process."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_k3.prefix_cache.admission import states_of
from sglang_k3.prefix_cache.component import KDAStateComponent
from sglang_k3.testing.loop import Loop
from sglang_k3.testing.server_process import draft_flags, free_port
from tests.inside import STRATEGIES, prompt_of

# State events on two free ports; twenty batches are kept for replay, so that a newcomer needs the snapshot.
EVENTS, REPLAY = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))


def publishing(publisher: str) -> tuple[str, ...]:
    config = {"publisher": publisher, "endpoint": EVENTS, "replay_endpoint": REPLAY, "bind": True}
    return ("--kv-events-config", json.dumps({**config, "buffer_steps": 20}))


EXAMPLES = Path(__file__).parents[3] / "examples"
# Batches of prefill and decode with chunks that end off a page; one request's worth of slots; a pool with one
# state for each path.
FLAGS = STRATEGIES | {
    "one request": (
        *STRATEGIES["extra_buffer"],
        *("--max-running-requests", "1", "--max-mamba-cache-size", "5"),
    ),
    "mixed": (*STRATEGIES["extra_buffer"], "--enable-mixed-chunk", "--chunked-prefill-size", "100"),
    "page 64": ("--page-size", "64", "--mamba-track-interval", "64"),
    "events": (*STRATEGIES["extra_buffer"], *publishing("states")),
    "joint events": (*STRATEGIES["extra_buffer"], *publishing("joint")),
    "one state a path": (*STRATEGIES["extra_buffer"], "--mamba-max-states-per-path", "1"),
}


@pytest.fixture(scope="session")
def loop() -> Loop:
    """The trained tiny K3 in exact mode; with its draft where K3_DRAFT is set. 12 slots, of which a running
    request has 3: states are evicted all the time."""
    flags = (
        *("--model-path", str(EXAMPLES / "tiny-k3"), "--dtype", "float32"),
        *("--enable-deterministic-inference", "--max-running-requests", "2"),
        *("--max-mamba-cache-size", "12", "--max-total-tokens", "2048"),
        *("--chunked-prefill-size", "256"),
        *("--radix-eviction-policy", os.environ.get("K3_EVICTION", "lru")),
        *FLAGS[os.environ["K3_STRATEGY"]],
    )
    return Loop(*flags, *(draft_flags(EXAMPLES / "tiny-k3-dspark") if "K3_DRAFT" in os.environ else ()))


@pytest.fixture
def states(loop: Loop) -> KDAStateComponent:
    found = states_of(loop.scheduler.tree_cache)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def clean(loop: Loop) -> Iterator[None]:
    """Each case starts from an empty cache and leaves no request behind, and no slot."""
    loop.flush()
    yield
    for request in list(loop.scheduler.running_batch.reqs) + list(loop.scheduler.waiting_queue):
        loop.abort(request.rid)
    loop.step(5)
    loop.flush()
    allocator = loop.scheduler.req_to_token_pool.mamba_allocator
    assert sorted(allocator.free_slots.tolist()) == list(range(1, allocator.size + 1)), "a slot leaked"


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    return prompt_of


@pytest.fixture
def told(loop: Loop) -> Callable[..., tuple]:
    """(tokens, logprobs) of one request, and the tokens of its prompt that were cached."""

    def run(ids: list[int], tokens: int = 6, **sampling: Any) -> tuple[tuple, int]:
        request = loop.admit(f"r{random.random()}", ids, tokens, logprobs=True, **sampling)
        loop.finish(request)
        written = tuple(request.output_ids), tuple(request.logprob.output_token_logprobs_val)
        return written, request.cached_tokens

    return run
