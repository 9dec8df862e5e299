"""Work held back on streams, run in a legal order that a seed chooses, as late as it may be; and a look at
whether the order is enough.

Two accesses to one tensor's memory, at least one of them a write, from two streams, must be ordered by an
event or by the host waiting in between. Vector clocks say whether they are, so a missing wait is found also
where the values happen to come out right.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

Clock = dict[int, int]
"""How far one knows each stream to be: its stream handle and the number of work there."""


def _join(into: Clock, other: Clock) -> None:
    for stream, turn in other.items():
        into[stream] = max(into.get(stream, 0), turn)


@dataclass
class _Item:
    """run: what to do; or event to record or wait for, of that turn."""

    name: str
    run: Callable[[], None] | None = None
    records: tuple[int, int] | None = None
    waits: tuple[int, int] | None = None


@dataclass
class _Touched:
    """The last write of a piece of memory, and the reads since: stream, number of work, operator."""

    write: tuple[int, int, str] | None = None
    reads: dict[int, tuple[int, str]] = field(default_factory=dict)


class Deadlock(RuntimeError):
    """A stream waits for an event that nobody will record."""


class Streams:
    """Queues by stream handle. An event is its handle and how often it was recorded.

    Seed 0 runs nothing before somebody waits for it. Other seeds also run a random share of what could run
    at random times, so that one stream is ahead of another in many ways.
    """

    def __init__(self, seed: int, drop: str | None = None) -> None:
        self._random = random.Random(seed)
        self._eager = 0.0 if seed == 0 else self._random.choice((0.02, 0.1, 0.3))
        self._queues: dict[int, deque[_Item]] = defaultdict(deque)
        self._turns: dict[int, int] = defaultdict(int)
        self._done: dict[int, int] = defaultdict(int)
        self._knows: dict[int, Clock] = defaultdict(dict)
        self._recorded: dict[int, Clock] = {}
        self._host: Clock = {}
        self._numbers: dict[int, int] = defaultdict(int)
        self._memory: dict[int, _Touched] = defaultdict(_Touched)
        self._drop = drop
        self.waits: list[str] = []
        """Lines of code that made one stream wait for another, and by it ordered something; the clocks do
        without those of the line `drop`."""
        self.races: list[str] = []

    # --- what the host asks for --------------------------------------------------------------------------

    def push(
        self,
        stream: int,
        work: Callable[[], None],
        name: str,
        reads: Collection[int] = (),
        writes: Collection[int] = (),
    ) -> None:
        """reads, writes: addresses of the tensors' memory."""
        self.launched(stream, name, reads, writes)
        self._queues[stream].append(_Item(name, run=work))
        self._advance()

    def launched(
        self, stream: int, name: str, reads: Collection[int] = (), writes: Collection[int] = ()
    ) -> None:
        """Look at what a launch touches; of one that the emulator computes at once, that is all."""
        self._numbers[stream] += 1
        number, knows = self._numbers[stream], self._knows[stream]
        _join(knows, self._host)
        knows[stream] = number
        for address in reads:
            self._touch(address, stream, number, name, write=False)
        for address in writes:
            self._touch(address, stream, number, name, write=True)

    def _touch(self, address: int, stream: int, number: int, name: str, *, write: bool) -> None:
        touched, knows = self._memory[address], self._knows[stream]
        if touched.write is not None:
            other, turn, writer = touched.write
            if other != stream and knows.get(other, 0) < turn:
                self.races.append(f"{name} reads or writes what {writer} writes on another stream")
        if not write:
            touched.reads[stream] = number, name
            return
        for other, (turn, reader) in touched.reads.items():
            if other != stream and knows.get(other, 0) < turn:
                self.races.append(f"{name} writes what {reader} reads on another stream")
        touched.write, touched.reads = (stream, number, name), {}

    def heard(self, kind: str, first: int, second: int, where: Callable[[], str]) -> int:
        """A call of the runtime, and who made it; for a query whether the event is done."""
        if kind == "record":
            self._turns[first] += 1
            _join(self._knows[second], self._host)
            self._recorded[first] = dict(self._knows[second])
            self._queues[second].append(_Item("record", records=(first, self._turns[first])))
        elif kind == "wait":
            if self._turns[second]:
                # A wait that is left out still runs in order, so that the scheduler lives to be asked again;
                # the clocks alone know nothing of it.
                if not self._left_out(first, second, where):
                    _join(self._knows[first], self._recorded[second])
                self._queues[first].append(_Item("wait", waits=(second, self._turns[second])))
        elif kind == "sync stream":
            self.drain(first)
        elif kind == "sync event":
            _join(self._host, self._recorded.get(first, {}))
            self._complete((first, self._turns[first]))
        elif kind in ("sync device", "copy", "set", "release"):
            self.drain_all()
        elif kind == "query":
            done = self._done[first] >= self._turns[first]
            if done:
                _join(self._host, self._recorded.get(first, {}))
            return int(done)
        return 1

    def _left_out(self, stream: int, event: int, where: Callable[[], str]) -> bool:
        # A wait for what the stream or the host knows to be done orders nothing.
        known = self._recorded[event].items()
        if all(max(self._knows[stream].get(s, 0), self._host.get(s, 0)) >= turn for s, turn in known):
            return False
        self.waits.append(where())
        return self._drop == self.waits[-1]

    # --- running -----------------------------------------------------------------------------------------

    def drain(self, stream: int, *, waited: bool = True) -> None:
        """Run everything on a stream, and of the others what it waits for. waited: a device's host would have
        waited for it too, and not the emulator alone."""
        while self._queues[stream]:
            self._step(stream)
        if waited:
            _join(self._host, self._knows[stream])

    def drain_all(self) -> None:
        for stream in list(self._queues):
            self.drain(stream)

    def _complete(self, event: tuple[int, int]) -> None:
        handle, turn = event
        while self._done[handle] < turn:
            for stream, queue in list(self._queues.items()):
                if any(
                    item.records and item.records[0] == handle and item.records[1] >= turn for item in queue
                ):
                    self._step(stream)
                    break
            else:
                raise Deadlock(f"event {handle:#x} was never recorded")

    def _step(self, stream: int) -> None:
        """The first item of a stream; what it waits for comes before it."""
        item = self._queues[stream][0]
        if item.waits is not None:
            self._complete(item.waits)
        # Another stream's item may have waited for this one meanwhile.
        if not self._queues[stream] or self._queues[stream][0] is not item:
            return
        self._queues[stream].popleft()
        if item.run is not None:
            item.run()
        if item.records is not None:
            handle, turn = item.records
            self._done[handle] = max(self._done[handle], turn)

    def _advance(self) -> None:
        while self._eager and self._random.random() < self._eager:
            ready = [
                stream
                for stream, queue in self._queues.items()
                if queue and (queue[0].waits is None or self._done[queue[0].waits[0]] >= queue[0].waits[1])
            ]
            if not ready:
                return
            self._step(self._random.choice(ready))
