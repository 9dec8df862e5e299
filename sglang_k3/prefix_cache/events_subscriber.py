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
from zmq.utils.monitor import recv_monitor_message

from sglang_k3.prefix_cache.events_index import Holdings
from sglang_k3.prefix_cache.events_schema import AllBlocksCleared, decode

_END = (-1).to_bytes(8, "big", signed=True)


class Subscriber:
    """holdings: what the worker holds by the last batch seen; synced: whether nothing is known to be missing.
    batches: taken in so far; gaps, restarts: how often batches were missed, and a worker came anew. heard:
    time.monotonic() of the last word from the worker, asked for or not.

    endpoint, replay: the publisher's sockets (`endpoint`, `replay_endpoint`). timeout_ms: a worker that says
    nothing for so long when asked what was missed is asked again. Of one thread.
    """

    def __init__(self, endpoint: str, replay: str, topic: str = "", timeout_ms: int = 2000) -> None:
        self.holdings = Holdings()
        self.synced = False
        self.batches = self.gaps = self.restarts = 0
        self.heard = float("-inf")
        self._replay_at, self._timeout = replay, timeout_ms
        self._last, self._last_time = -1, 0.0
        self._replayed: set[tuple[int, bytes]] = set()
        self._question: _Question | None = None
        self._ask_again = False
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt_string(zmq.SUBSCRIBE, topic)
        # A worker publishes whether we are connected or not: what came in between has to be asked for.
        self._connections = self._live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._live.connect(endpoint)

    def poll(self, timeout_ms: int) -> bool:
        """Take in what has come, waiting at most so long for the first of it; what is missing is asked for,
        and its answer taken in by whichever call it comes in. Returns `synced`."""
        ends = time.monotonic() + timeout_ms / 1000
        while True:
            if self._connected_anew():
                self._ask_again = self._question is not None
                self.ask()
            elif not self.synced:
                self.ask()
            # Live batches wait while an answer is under way: it holds those before them.
            source = self._live if self._question is None else self._question.socket
            if source.poll(max(0, round(1000 * (ends - time.monotonic())))):
                if self._question is not None:
                    self._take_answer(self._question)
                else:
                    _, number, payload = self._live.recv_multipart()
                    self._take(int.from_bytes(number, "big"), payload)
                if self._question is None:
                    ends = 0.0
            elif self._question is None or not self._question.late():
                return self.synced
            else:
                self._unanswered()
                if time.monotonic() >= ends:
                    return False

    @property
    def asking(self) -> bool:
        """Whether an answer is under way."""
        return self._question is not None

    def ask(self) -> None:
        """Ask for all that was published since the last batch seen, without waiting for the answer; nothing
        is done where a question is under way."""
        if self._question is None:
            self._question = _Question(self._context, self._replay_at, max(0, self._last), self._timeout)

    def catch_up(self) -> bool:
        """The same, and wait for the answer. False if the worker does not give it."""
        # The answer to a question that is under way may have been given long ago, and not been read yet.
        self._ask_again = self._question is not None
        self.ask()
        while self._question is not None:
            question = self._question
            if question.socket.poll(self._timeout):
                self._take_answer(question)
            else:
                self._unanswered()
                return False
        return self.synced

    def _connected_anew(self) -> bool:
        found = False
        while self._connections.poll(0):
            recv_monitor_message(self._connections)
            found = True
        return found

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
        self.ask()

    def _take_answer(self, question: _Question) -> None:
        """A frame of it; all of it behind the last one."""
        if not question.whole():
            return
        self.heard = time.monotonic()
        self._drop_question()
        self._answered(question.start, question.found)

    def _answered(self, start: int, found: list[tuple[int, bytes]]) -> None:
        if self._last >= 0:
            if found and found[0][0] == self._last and decode(found[0][1]).ts == self._last_time:
                if not _is_snapshot(found[0][1]):
                    found = found[1:]
            elif not found or found[0][0] <= self._last or not _is_snapshot(found[0][1]):
                # It does not know what we have from it: another process answers.
                self.restarts += 1
                self.holdings = Holdings()
                self._last, self.synced = -1, False
                if start > 0:
                    self.ask()
                    return
        for number, payload in found:
            self._apply(number, payload)
        self._replayed = set(found)
        self.synced = True
        if self._ask_again:
            self._ask_again = False
            self.ask()

    def _apply(self, number: int, payload: bytes) -> None:
        batch = decode(payload)
        self.holdings.apply(batch)
        self.batches += 1
        self._last, self._last_time = number, batch.ts

    def _unanswered(self) -> None:
        """The worker gave no answer; what it holds is not known any more."""
        self._drop_question()
        self.synced = False

    def _drop_question(self) -> None:
        if self._question is not None:
            self._question.socket.close()
            self._question = None

    def close(self) -> None:
        self._drop_question()
        self._live.disable_monitor()
        self._connections.close(linger=0)
        self._live.close(linger=0)
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Question:
    """A request for replay under way. found: (number, payload) of the batches so far, from `start` on."""

    def __init__(self, context: zmq.Context, replay: str, start: int, timeout_ms: int) -> None:
        # A socket of its own each time: an answer that came too late must not be taken for the next one's.
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(replay)
        self.socket.send_multipart((b"", start.to_bytes(8, "big")))
        self.start, self.found = start, list[tuple[int, bytes]]()
        self._timeout, self._last_word = timeout_ms, time.monotonic()

    def whole(self) -> bool:
        """Take in a frame that has come; whether it was the last one."""
        _, _, number, payload = self.socket.recv_multipart()
        self._last_word = time.monotonic()
        if number == _END:
            return True
        self.found.append((int.from_bytes(number, "big"), payload))
        return False

    def late(self) -> bool:
        return 1000 * (time.monotonic() - self._last_word) > self._timeout


def _is_snapshot(payload: bytes) -> bool:
    events = decode(payload).events
    return bool(events) and isinstance(events[0], AllBlocksCleared)
