"""SGLang's event publisher, with an answer for those who come late: everything that is held now.

Chosen by `--kv-events-config '{"publisher": "states"}'` (group schema) or `"joint"`. SGLang gives each DP
rank one, numbers the batches and keeps the last of them for replay; that buffer is bounded, and what was held
before its first batch is lost to a newcomer. So the publisher's thread follows its own stream.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import time
from collections import deque
from typing import Any

import msgspec
from sglang.srt.disaggregation.kv_events import EventBatch, EventPublisherFactory, ZmqEventPublisher

from sglang_k3.prefix_cache.events_index import Holdings
from sglang_k3.prefix_cache.events_schema import Batch, decode

STATES, JOINT = "states", "joint"
EVERYWHERE, LOOPBACK = "tcp://*:5557", "tcp://127.0.0.1:5557"
"""SGLang's default endpoint, and ours in its place: prompts' hashes and tokens are not for everybody."""

logger = logging.getLogger(__name__)


class SnapshotPublisher(ZmqEventPublisher):
    """A replay request from a sequence that the buffer no longer holds is answered by one batch in the place
    of the missing ones: AllBlocksCleared and what is held, under the number of the last batch published."""

    def __init__(self, attn_dp_rank: int, *, batches_per_second: float = math.inf, **options: Any) -> None:
        """options: SGLang's."""
        self._held = Holdings()
        if options.get("endpoint") == EVERYWHERE:
            options["endpoint"], options["bind"] = LOOPBACK, True
        super().__init__(attn_dp_rank, **options)
        # Nothing is published before the constructor returns, and the thread looks for its queue each time.
        if batches_per_second < math.inf:
            self._event_queue = _Paced(self._event_queue.maxsize, 1 / batches_per_second)
        self._buffer = _Followed(self._held, maxlen=self._buffer.maxlen)

    def publish(self, events: EventBatch) -> None:
        """Never waits: a queue that is full means that the publishing thread has died."""
        events.attn_dp_rank = self._dp_rank if events.attn_dp_rank is None else events.attn_dp_rank
        try:
            self._event_queue.put_nowait(events)
        except queue.Full:
            logger.error("State events are lost: the publisher's thread takes none from its queue any more.")

    def _service_replay(self) -> None:
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        client, _, asked = frames
        start = int.from_bytes(asked, "big")
        kept = list(self._buffer)
        if kept and start < kept[0][0]:
            last, payload = kept[-1]
            # Number and time of the last batch: by these a follower knows this publisher again.
            snapshot = Batch(decode(payload).ts, [*self._held.events()], self._dp_rank)
            self._answer(client, last, msgspec.msgpack.encode(snapshot))
        else:
            for number, payload in kept:
                if number >= start:
                    self._answer(client, number, payload)
        self._replay.send_multipart((client, b"", b"", self.END_SEQ, b""))

    def _answer(self, client: bytes, number: int, payload: bytes) -> None:
        assert self._replay is not None
        self._replay.send_multipart((client, b"", self._topic_bytes, number.to_bytes(8, "big"), payload))


class _Paced(queue.Queue):
    """Hands out at most one batch in `interval_s`; what came meanwhile, together."""

    def __init__(self, maxsize: int, interval_s: float) -> None:
        super().__init__(maxsize)
        self._interval, self._next = interval_s, 0.0

    def get(self, block: bool = True, timeout: float | None = None) -> EventBatch | None:
        """Raises queue.Empty, also while it is too early for the next batch."""
        early = self._next - time.monotonic()
        if early > 0:
            time.sleep(early if timeout is None else min(early, timeout))
            if timeout is not None and early > timeout:
                raise queue.Empty
        batch = super().get(block, timeout)
        while batch is not None and self.qsize():
            more = super().get(False)
            if more is None:
                # The end of the thread, which comes behind this batch.
                self.put_nowait(None)
                break
            batch = EventBatch(more.ts, [*batch.events, *more.events], more.attn_dp_rank)
        self._next = time.monotonic() + self._interval
        return batch


class _Followed(deque[tuple[int, bytes]]):
    """The publisher's buffer, by which `held` learns of each batch as it is published."""

    def __init__(self, held: Holdings, maxlen: int | None) -> None:
        super().__init__(maxlen=maxlen)
        self._held = held

    def append(self, item: tuple[int, bytes]) -> None:
        super().append(item)
        self._held.apply(decode(item[1]))


def _create(attn_dp_rank: int, **options: Any) -> SnapshotPublisher:
    """As SGLang's factory asks for it, which knows its own options alone."""
    from sglang.srt.runtime_context import get_observability

    pace = batches_per_second(get_observability().kv_events_config or "{}")
    return SnapshotPublisher(attn_dp_rank, batches_per_second=pace, **options)


def register() -> None:
    for name in (STATES, JOINT):
        if name not in EventPublisherFactory._registry:
            EventPublisherFactory.register_publisher(name, _create)


def registered() -> bool:
    return all(EventPublisherFactory._registry.get(name) is _create for name in (STATES, JOINT))


def mode_of(config: str | None) -> str | None:
    """STATES, JOINT, or None for SGLang's own events."""
    name = json.loads(config).get("publisher") if config else None
    return name if name in (STATES, JOINT) else None


def with_token_ids(config: str) -> bool:
    """`token_ids` of the config. Raises ValueError for what is neither true nor false."""
    value = json.loads(config).get("token_ids", True)
    if not isinstance(value, bool):
        raise ValueError(f"--kv-events-config token_ids is {value!r}: pass true or false")
    return value


def batches_per_second(config: str) -> float:
    """`batches_per_second` of the config; infinite where it is left out. Raises ValueError for what is no
    positive number."""
    value = json.loads(config).get("batches_per_second", math.inf)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"--kv-events-config batches_per_second is {value!r}: pass a positive number")
    return float(value)
