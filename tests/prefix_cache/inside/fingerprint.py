"""A model that keeps in each state a fingerprint of the tokens that made it.

It takes the real model's place under the real scheduler, pools and tree. Its next token depends on every
token before it, by way of the state alone; and at each call it compares the state it starts from with the
tokens whose KV the request owns. So a state at a wrong depth, of another prefix or beside another's KV is an
error where it is first used, and a thousand schedules take no longer than ten with the real one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_k3.broken_requests import guard

_PRIME = 65_521  # fp32 holds it exactly
VOCABULARY = 2048


def fingerprint(tokens: Iterable[int], start: int = 0) -> int:
    for token in tokens:
        start = (start * 31 + int(token) + 1) % _PRIME
    return start


def follow(tokens: list[int], count: int) -> list[int]:
    """What a request for `count` tokens behind these is answered."""
    state, written = fingerprint(tokens), []
    for _ in range(count):
        written.append(_next(state))
        state = fingerprint(written[-1:], state)
    return written


def _next(state: int) -> int:
    return state * 7 % 1500


class FingerprintModel:
    """Stands in for model.forward. states: (depth, fingerprint) in the first two numbers of a slot."""

    def __init__(self, runner: Any) -> None:
        self.backend = runner.attn_backend
        self.pool = runner.req_to_token_pool
        self.states = self.pool.mamba_pool.mamba_cache.temporal[0].flatten(1)
        # Row 0 of the KV cache stands for padding.
        self.tokens_of = torch.full((runner.token_to_kv_pool.size + 64,), -1, dtype=torch.int64)

    def state(self, slot: int) -> tuple[int, int]:
        depth, value = self.states[slot, :2].tolist()
        return int(depth), int(value)

    def __call__(self, input_ids: torch.Tensor, positions: Any, forward_batch: Any, **rest: Any) -> Any:
        batch = self.backend.linear_attn_backend.forward_metadata
        self.tokens_of[forward_batch.out_cache_loc] = input_ids
        count = len(batch.slots)
        logits = torch.zeros(count, VOCABULARY)
        starts = batch.cu_seqlens.tolist()
        for i in range(count):
            slot, prefix, row = int(batch.slots[i]), int(batch.prefix_lens[i]), int(batch.rows[i])
            depth, value = (0, 0) if batch.fresh[i] else self.state(slot)
            owned = self.tokens_of[self.pool.req_to_token[row, :prefix].long()].tolist()
            assert depth == prefix, f"a state of {depth} tokens where {prefix} are computed"
            assert value == fingerprint(owned), "a state of other tokens than the KV beside it"
            track = int(batch.track_offsets[i])
            for position, token in enumerate(input_ids[starts[i] : starts[i + 1]].tolist(), 1):
                value = fingerprint([token], value)
                depth += 1
                if position == track:
                    self._keep(int(batch.track_slots[i]), depth, value)
            self._keep(slot, depth, value)
            logits[i, _next(value)] = 1.0
        if batch.decode and batch.copy_to.numel():
            self.states[batch.copy_to] = self.states[batch.copy_from]
        return guard(LogitsProcessorOutput(next_token_logits=logits))

    def _keep(self, slot: int, depth: int, value: int) -> None:
        self.states[slot, :2] = torch.tensor([depth, value], dtype=self.states.dtype)
