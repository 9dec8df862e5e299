"""Which worker a prompt goes to: the one that restores the most of it, less its load. Needs pyzmq and
msgspec.

A library for routers: it chooses, and steers nothing. It hears of each worker by its state events.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_k3.prefix_cache.events_index import Holdings
from sglang_k3.prefix_cache.events_subscriber import Subscriber


@dataclass(frozen=True)
class Choice:
    """worker: its name. hit: tokens that it is expected to restore. by_load: nothing told the workers apart
    but their load."""

    worker: str
    hit: int
    by_load: bool


@dataclass
class Counts:
    """Choices: by what a worker holds, by load since no worker holds anything of the prompt, and by load
    since nobody had been heard of for too long."""

    by_hit: int = 0
    by_load: int = 0
    stale: int = 0


class Chooser:
    """page: the workers' page size. load_tokens: prompt tokens that one request under way weighs.
    stale_s: a worker not heard of for so long is taken to hold nothing. most_blocks: blocks remembered a
    worker; one that holds more is taken to hold nothing, until it is told again."""

    def __init__(
        self,
        workers: Mapping[str, Subscriber],
        page: int,
        load_tokens: int = 512,
        stale_s: float = 10.0,
        most_blocks: int = 1_000_000,
    ) -> None:
        if not workers:
            raise ValueError("no workers to choose from: name at least one")
        self.workers, self.page, self.load_tokens = dict(workers), page, load_tokens
        self.stale_s, self.most_blocks = stale_s, most_blocks
        self.counts = Counts()
        self.load = dict.fromkeys(self.workers, 0)

    def refresh(self) -> None:
        """Take in what the workers have said. One that says nothing is asked once half of stale_s has
        passed."""
        for worker in self.workers.values():
            worker.poll(0)
            if time.monotonic() - worker.heard > self.stale_s / 2:
                worker.catch_up()

    def choose(self, ids: Sequence[int]) -> Choice:
        """The worker for a prompt; the caller says `started` and `ended`. Ties go to the less loaded, then to
        the one named first."""
        now = time.monotonic()
        fresh = {
            name: worker.holdings
            for name, worker in self.workers.items()
            if worker.synced
            and now - worker.heard <= self.stale_s
            and len(worker.holdings.blocks) <= self.most_blocks
        }
        blocks = block_hashes(ids, self.page)
        hits = {name: self.hit(held, blocks) for name, held in fresh.items()}
        best = max(
            self.workers,
            key=lambda name: (hits.get(name, 0) - self.load_tokens * self.load[name], -self.load[name]),
        )
        hit = hits.get(best, 0)
        if not fresh:
            self.counts.stale += 1
        elif not any(hits.values()):
            self.counts.by_load += 1
        else:
            self.counts.by_hit += 1
        return Choice(best, hit, not any(hits.values()))

    def hit(self, held: Holdings, blocks: Sequence[int]) -> int:
        return held.hit(blocks, self.page)

    def started(self, worker: str) -> None:
        self.load[worker] += 1

    def ended(self, worker: str) -> None:
        self.load[worker] -= 1


class KVChooser(Chooser):
    """The same by KV blocks alone, as routers do that know of no states: for comparison."""

    def hit(self, held: Holdings, blocks: Sequence[int]) -> int:
        return held.kv_hit(blocks, self.page)


def block_hashes(ids: Sequence[int], page: int) -> list[int]:
    """Hashes of the whole pages that a prompt can be found by, all but its last token, as SGLang's events
    have them: SHA-256 over the hash before and the tokens as unsigned 32-bit little-endian; its first 8
    bytes, signed.
    """
    found, before = [], b""
    for start in range(0, (len(ids) - 1) // page * page, page):
        digest = hashlib.sha256(before)
        for token in ids[start : start + page]:
            digest.update(int(token).to_bytes(4, "little"))
        before = digest.digest()
        found.append(int.from_bytes(before[:8], "big", signed=True))
    return found
