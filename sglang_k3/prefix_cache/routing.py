"""Which worker a prompt goes to: the one that restores the most of it, less its load. Needs pyzmq and
msgspec.

A library for routers: it chooses, and steers nothing. It hears of each worker by its state events. KV behind
the deepest state saves no prefill, but says where a path lives: a session that stays there leaves its states
in one cache and not in two, so it pulls a little.
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
    """page: the workers' page size. load_tokens: prompt tokens that one request under way weighs. kv_share:
    what a token of KV behind the deepest state weighs, by one that is restored. stale_s: a worker not heard
    of for so long is taken to hold nothing. most_blocks: blocks remembered a worker; one that holds more is
    taken to hold nothing, until it is told again."""

    def __init__(
        self,
        workers: Mapping[str, Subscriber],
        page: int,
        load_tokens: int = 512,
        kv_share: float = 0.2,
        stale_s: float = 10.0,
        most_blocks: int = 1_000_000,
    ) -> None:
        if not workers:
            raise ValueError("no workers to choose from: name at least one")
        self.workers, self.page = dict(workers), page
        self.load_tokens, self.kv_share = load_tokens, kv_share
        self.stale_s, self.most_blocks = stale_s, most_blocks
        self.counts = Counts()
        self.load = dict.fromkeys(self.workers, 0)

    def refresh(self, patience_ms: int = 0) -> None:
        """Take in what the workers have said. One that says nothing is asked once half of stale_s has passed;
        answers come in when they come, and are waited for at most so long in all."""
        ends = time.monotonic() + patience_ms / 1000
        for worker in self.workers.values():
            worker.poll(0)
            if time.monotonic() - worker.heard > self.stale_s / 2:
                worker.ask()
            while worker.asking and (rest := ends - time.monotonic()) > 0:
                worker.poll(max(1, round(1000 * rest)))

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
        worth = {name: self.worth(held, blocks) for name, held in fresh.items()}
        nothing = 0, 0.0

        def score(name: str) -> tuple[float, int]:
            return worth.get(name, nothing)[1] - self.load_tokens * self.load[name], -self.load[name]

        best = max(self.workers, key=score)
        by_load = not any(value for _, value in worth.values())
        if not fresh:
            self.counts.stale += 1
        elif by_load:
            self.counts.by_load += 1
        else:
            self.counts.by_hit += 1
        return Choice(best, worth.get(best, nothing)[0], by_load)

    def worth(self, held: Holdings, blocks: Sequence[int]) -> tuple[int, float]:
        """(tokens that a worker is expected to restore, what its holdings weigh in tokens)."""
        hit, kv = held.depths(blocks, self.page)
        return hit, hit + self.kv_share * (kv - hit)

    def started(self, worker: str) -> None:
        self.load[worker] += 1

    def ended(self, worker: str) -> None:
        self.load[worker] -= 1


class KVChooser(Chooser):
    """The same by KV blocks alone, as routers do that know of no states: for comparison."""

    def worth(self, held: Holdings, blocks: Sequence[int]) -> tuple[int, float]:
        kv = held.kv_hit(blocks, self.page)
        return kv, kv


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
