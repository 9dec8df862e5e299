"""Eviction by value: P(reuse) × cost of computing again what the state saves / bytes.

Every request leaves a path in the tree, which the next turn extends, or leaves in front of its end (an edit,
a retry). A state serves the requests that leave its path behind it and in front of the next deeper state. So
its P(reuse) is, summed over the paths through it, how soon the path comes back times how likely it is left in
that stretch (`reuse`). What it saves is the prefill from the nearest state above that is still there: each
eviction changes what the states around are worth, and both are computed anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from sglang_k3.prefix_cache.eviction import Eviction, Node, Surroundings, depth_of, path_up
from sglang_k3.prefix_cache.reuse import Departures, Kind, Returns, bin_of

_MOST_PATHS = 4096
"""Paths that are remembered; the longest unused is forgotten first."""


@dataclass(eq=False)
class Path:
    """end: deepest node of it that is still there; length: tokens when it was last extended. seen: number of
    the request that used it last."""

    end: Node
    length: int
    kind: Kind
    seen: int


class ByValue(Eviction):
    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self.clear()

    def clear(self) -> None:
        self._clock = 0
        self._returns, self._departures = Returns(), Departures()
        self._paths: dict[Path, None] = {}
        self._ending: dict[Node, list[Path]] = {}
        self._of: WeakKeyDictionary[Any, Path | Kind] = WeakKeyDictionary()
        self._uses: dict[Node, float] = {}
        self._stretch: dict[Node, tuple[int, int]] = {}
        self._expected: dict[Path, list[tuple[Node, float]]] = {}
        self._rates = self._returns.indices(())
        self._stale, self._going = True, None
        self._moved: set[Path] = set()

    # --- what happens ------------------------------------------------------------------------------------

    def started(self, request: Any, node: Node | None, kv: int) -> None:
        self._clock += 1
        self._stale = True
        self._of[request] = Kind.NEW
        if node is None or kv <= 0 or node.parent is None:
            return
        here = self._ending.get(node, ())
        own = max((path for path in here if path.kind < Kind.FORK), key=lambda path: path.seen, default=None)
        if own is not None:
            self._came_back(own)
            if own.length == kv:
                self._departures.left(kv, kv)
                self._departures.grew(len(request.origin_input_ids) - kv)
            own.kind = Kind.ALIVE
            self._of[request] = own
            return
        fork = next((path for path in here if path.kind >= Kind.FORK), None)
        if fork is None:
            self._add(Path(node, kv, Kind.FORK, self._clock))
        else:
            self._came_back(fork)
            fork.kind = Kind.SHARED
        below = self._latest_below(node)
        # Who shares less than half of a path is somebody else, with the same instructions in front.
        if below is not None and 2 * kv > below.length:
            self._came_back(below)
            self._departures.left(kv, below.length)
            below.kind = Kind.LEFT
            self._of[request] = Kind.ALIVE

    def kept(self, request: Any, node: Node) -> None:
        self._stale = True
        path = self._of.get(request, Kind.NEW)
        depth = depth_of(node)
        if isinstance(path, Path) and path in self._paths:
            self._unlink(path)
            path.end, path.length, path.seen = node, depth, self._clock
            self._link(path)
        else:
            kind = path if isinstance(path, Kind) else path.kind
            self._of[request] = path = Path(node, depth, kind, self._clock)
            self._add(path)

    def dropped(self, node: Node) -> None:
        """Its paths end at the parent now, and remember how long they were."""
        for path in self._ending.pop(node, ()):
            path.end = node.parent
            self._moved.add(path)
            if node.parent.parent is None or path.kind >= Kind.FORK:
                self._forget(path)
            else:
                self._link(path)

    def _came_back(self, path: Path) -> None:
        self._returns.came_back(path.kind, self._clock - path.seen)
        path.seen = self._clock
        self._paths[path] = self._paths.pop(path)

    def _latest_below(self, node: Node) -> Path | None:
        own = (path for path in self._paths_below(node) if path.kind < Kind.FORK)
        return max(own, key=lambda path: path.seen, default=None)

    def _add(self, path: Path) -> None:
        self._paths[path] = None
        self._link(path)
        while len(self._paths) > _MOST_PATHS:
            oldest = next(iter(self._paths))
            self._unlink(oldest)
            self._forget(oldest)

    def _forget(self, path: Path) -> None:
        del self._paths[path]
        self._returns.gone(path.kind, self._clock - path.seen)

    def _link(self, path: Path) -> None:
        self._ending.setdefault(path.end, []).append(path)

    def _unlink(self, path: Path) -> None:
        ending = self._ending[path.end]
        ending.remove(path)
        if not ending:
            del self._ending[path.end]

    # --- what goes ---------------------------------------------------------------------------------------

    def victim(self, states: Sequence[Node]) -> Node:
        self._value_paths()
        chosen = min(states, key=self.worth)
        self._going = chosen
        return chosen

    def worth(self, node: Node) -> float:
        """Seconds of prefill that the state's slot saves, a request and byte."""
        above, depth = self._stretch.get(node, (0, 0))
        saved = self._around.cost.between(above, depth)
        return self._uses.get(node, 0.0) * saved / self._around.state_bytes

    def _value_paths(self) -> None:
        """Bring what paths expect of states up to date: of all of them when a request came in between, else
        of those that the last victim lay on."""
        if self._stale:
            self._rates = self._returns.indices((path.kind, self._clock - path.seen) for path in self._paths)
            self._uses, self._stretch, self._expected = {}, {}, {}
            changed: Iterable[Path] = self._paths
        else:
            changed = self._moved
            if self._going is not None and not self._around.holds(self._going):
                changed = {*changed, *self._paths_below(self._going)}
                self._uses.pop(self._going, None)
        for path in changed:
            for node, uses in self._expected.pop(path, ()):
                if node in self._uses:
                    self._uses[node] -= uses
            if path in self._paths:
                self._expected[path] = self._expect(path)
        self._stale, self._going, self._moved = False, None, set()

    def _expect(self, path: Path) -> list[tuple[Node, float]]:
        rate = float(self._rates[path.kind, bin_of(self._clock - path.seen)])
        states, covered, found = self._states_on(path.end), 0.0, []
        for place, (node, depth) in enumerate(states):
            reached = 1.0 if path.kind >= Kind.FORK else self._departures.uses(depth, path.length)
            uses, covered = rate * (reached - covered), reached
            found.append((node, uses))
            self._uses[node] = self._uses.get(node, 0.0) + uses
            self._stretch[node] = states[place + 1][1] if place + 1 < len(states) else 0, depth
        return found

    def _states_on(self, end: Node) -> list[tuple[Node, int]]:
        """(node, depth) of the states on the way to a path's end, the deepest first."""
        depth, found = depth_of(end), []
        for node in path_up(end):
            if self._around.holds(node):
                found.append((node, depth))
            depth -= len(node.key)
        return found

    def _paths_below(self, node: Node) -> Iterator[Path]:
        """Paths that end at the node or behind it."""
        waiting = [node]
        while waiting:
            below = waiting.pop()
            waiting.extend(below.children.values())
            yield from self._ending.get(below, ())
