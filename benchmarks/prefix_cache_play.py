"""Plays traces through SGLang's real scheduler, pools and tree, with a stand-in for the model's arithmetic.

    python -m benchmarks.prefix_cache_play ORDER.json RESULT.json

Run by `benchmarks.prefix_cache`, a process for each size of the state pool: SGLang keeps one configuration a
process. The stand-in writes the answers that the trace holds; nothing else differs from serving.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.prefix_cache_traces import Trace


class Order(msgspec.Struct):
    """flags: launch_server's. policies: name and config of each; none where the tree is SGLang's own."""

    flags: list[str]
    traces: list[Trace]
    policies: list[tuple[str, dict[str, float]]]


class Played(msgspec.Struct):
    """cached: tokens of each prompt that were found. lost: cached KV computed again, by reason.
    eviction_seconds: spent on choosing victims, over `evictions` of them."""

    trace: str
    policy: str
    config: dict[str, float]
    cached: list[int]
    lost: dict[str, int]
    evictions: int
    eviction_seconds: float


class Scripted:
    """Takes model.forward's place: each request's next token is the one that its script holds."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.scripts: dict[str, tuple[int, list[int]]] = {}

    def __call__(self, input_ids: torch.Tensor, positions: Any, forward_batch: Any, **rest: Any) -> Any:
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        from sglang_k3.broken_requests import guard

        lengths = forward_batch.seq_lens.tolist()
        logits = torch.zeros(len(lengths), self.vocabulary)
        for row, (rid, length) in enumerate(zip(forward_batch.rids, lengths, strict=True)):
            prompt, answer = self.scripts[rid]
            at = length - prompt
            logits[row, answer[at] if 0 <= at < len(answer) else 0] = 1.0
        return guard(LogitsProcessorOutput(next_token_logits=logits))


class _Timed:
    """A policy, and how long it takes to choose."""

    def __init__(self, policy: Any) -> None:
        self._policy, self.count, self.seconds = policy, 0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def victim(self, states: Any) -> Any:
        began = time.perf_counter()
        chosen = self._policy.victim(states)
        self.seconds += time.perf_counter() - began
        self.count += 1
        return chosen


def play(loop: Any, model: Scripted, trace: Trace) -> list[int]:
    """Tokens of each prompt that were cached."""
    loop.flush()
    cached = []
    for number, request in enumerate(trace.requests):
        rid = f"{trace.name} {number}"
        model.scripts = {rid: (len(request.prompt), request.answer)}
        req = loop.admit(rid, request.prompt, len(request.answer))
        loop.finish(req)
        assert list(req.output_ids) == request.answer, "the stand-in wrote something else"
        cached.append(req.cached_tokens)
    return cached


def main() -> None:
    from sglang_k3.prefix_cache import eviction
    from sglang_k3.prefix_cache.admission import states_of
    from sglang_k3.testing.loop import Loop

    order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Order)
    loop = Loop(*order.flags)
    runner = loop.scheduler.tp_worker.model_runner
    model = Scripted(runner.model_config.vocab_size)
    runner.model.forward = model
    states = states_of(loop.scheduler.tree_cache)
    results = []
    for trace in order.traces:
        for name, config in order.policies:
            timed = None
            before: dict[str, int] = {}
            if states is not None:
                made = eviction.make(name, config or None, states.surroundings)
                states.eviction = timed = None if made is None else _Timed(made)  # type: ignore[assignment]
                before = dict(states.metrics.outcomes)
            cached = play(loop, model, trace)
            lost = {} if states is None else {k: states.metrics.outcomes[k] - before[k] for k in before}
            results.append(
                Played(
                    trace=trace.name,
                    policy=name,
                    config=config,
                    cached=cached,
                    lost={key: value for key, value in lost.items() if key != "hit"},
                    evictions=timed.count if timed else 0,
                    eviction_seconds=timed.seconds if timed else 0.0,
                )
            )
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(results))


if __name__ == "__main__":
    main()
