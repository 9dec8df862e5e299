"""Follows a worker's state events: late, through gaps, over the worker's restart. Needs pyzmq and msgspec.

with Subscriber("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558") as worker:
    while True:
        worker.poll(100)
        print(len(worker.holdings.states))
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import zmq

from sglang_k3.prefix_cache.events_index import Holdings
from sglang_k3.prefix_cache.events_schema import AllBlocksCleared, decode

_END = (-1).to_bytes(8, "big", signed=True)


class Subscriber:
    """holdings: what the worker holds by the last batch seen; synced: whether nothing is known to be missing.
    gaps, restarts: how often batches were missed, and a worker came anew. heard: time.monotonic() of the last
    word from the worker, asked for or not.

    endpoint, replay: the publisher's sockets (`endpoint`, `replay_endpoint`).
    """

    def __init__(self, endpoint: str, replay: str, topic: str = "", timeout_ms: int = 2000) -> None:
        self.holdings = Holdings()
        self.synced = False
        self.gaps = self.restarts = 0
        self.heard = float("-inf")
        self._replay_at, self._timeout = replay, timeout_ms
        self._last, self._last_time = -1, 0.0
        self._replayed: set[tuple[int, bytes]] = set()
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._live.connect(endpoint)

    def poll(self, timeout_ms: int) -> bool:
        """Take in what has come, waiting so long for the first of it; catch up where something is missing.
        Returns `synced`."""
        if not self.synced:
            self.catch_up()
        wait = timeout_ms
        while self._live.poll(wait):
            _, number, payload = self._live.recv_multipart()
            self._take(int.from_bytes(number, "big"), payload)
            wait = 0
        return self.synced

    def catch_up(self) -> bool:
        """Ask for all that was published since the last batch seen. False if the worker does not answer."""
        found = self._ask(max(0, self._last))
        if found is None:
            self.synced = False
            return False
        if self._last >= 0:
            if found and found[0][0] == self._last and decode(found[0][1]).ts == self._last_time:
                if not _is_snapshot(found[0][1]):
                    found = found[1:]
            elif not found or found[0][0] <= self._last or not _is_snapshot(found[0][1]):
                # It does not know what we have from it: another process answers.
                self.restarts += 1
                self.holdings = Holdings()
                self._last = -1
                found = self._ask(0)
                if found is None:
                    self.synced = False
                    return False
        for number, payload in found:
            self._apply(number, payload)
        self._replayed = set(found)
        self.synced = True
        return True

    def _take(self, number: int, payload: bytes) -> None:
        self.heard = time.monotonic()
        if self.synced and number == self._last + 1:
            self._apply(number, payload)
            self._replayed.clear()
            return
        # Came by replay already; or a worker that came anew counts from 0 again. It is asked which.
        if self.synced and (number, payload) in self._replayed:
            return
        self.gaps += number > self._last + 1
        self.catch_up()

    def _apply(self, number: int, payload: bytes) -> None:
        batch = decode(payload)
        self.holdings.apply(batch)
        self._last, self._last_time = number, batch.ts

    def _ask(self, start: int) -> list[tuple[int, bytes]] | None:
        """(number, payload) of the batches from `start` on; None if the answer did not come whole."""
        # A socket of its own each time: an answer that came too late must not be taken for the next one's.
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        try:
            socket.connect(self._replay_at)
            socket.send_multipart((b"", start.to_bytes(8, "big")))
            found: list[tuple[int, bytes]] = []
            while socket.poll(self._timeout):
                _, _, number, payload = socket.recv_multipart()
                if number == _END:
                    self.heard = time.monotonic()
                    return found
                found.append((int.from_bytes(number, "big"), payload))
            return None
        finally:
            socket.close()

    def close(self) -> None:
        self._live.close(linger=0)
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_snapshot(payload: bytes) -> bool:
    events = decode(payload).events
    return bool(events) and isinstance(events[0], AllBlocksCleared)
