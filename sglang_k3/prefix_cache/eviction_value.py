"""Eviction by value: P(reuse) × cost of computing again what the state saves / bytes.

Every request leaves a path in the tree, which the next turn extends, or leaves in front of its end (an edit,
a retry). A state serves the requests that leave its path behind it and in front of the next deeper state. So
its P(reuse) is, summed over the paths through it, how soon the path comes back times how likely it is left in
that stretch (`reuse`). What it saves is the prefill from the nearest state above that is still there: each
eviction changes what the states around are worth, and both are computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        self._worth: dict[Node, float] | None = None

    # --- what happens ------------------------------------------------------------------------------------

    def started(self, request: Any, node: Node | None, kv: int) -> None:
        self._clock += 1
        self._worth = None
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
        self._worth = None
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
            if node.parent.parent is None or path.kind >= Kind.FORK:
                self._forget(path)
            else:
                self._link(path)

    def _came_back(self, path: Path) -> None:
        self._returns.came_back(path.kind, self._clock - path.seen)
        path.seen = self._clock
        self._paths[path] = self._paths.pop(path)

    def _latest_below(self, node: Node) -> Path | None:
        found, waiting = None, list(node.children.values())
        while waiting:
            below = waiting.pop()
            waiting.extend(below.children.values())
            for path in self._ending.get(below, ()):
                if path.kind < Kind.FORK and (found is None or path.seen > found.seen):
                    found = path
        return found

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
        if self._worth is None:
            self._worth = self._worths()
        worth = self._worth
        chosen = min(states, key=lambda node: worth.get(node, 0.0))
        # The states above and below it are worth more without it.
        self._worth = None
        return chosen

    def _worths(self) -> dict[Node, float]:
        """Seconds of prefill that each state's slot saves, a request and byte."""
        indices = self._returns.indices((path.kind, self._clock - path.seen) for path in self._paths)
        uses: dict[Node, float] = {}
        stretch: dict[Node, tuple[int, int]] = {}
        for path in self._paths:
            rate = float(indices[path.kind, bin_of(self._clock - path.seen)])
            states = self._states_on(path.end)
            covered = 0.0
            for place, (node, depth) in enumerate(states):
                reached = 1.0 if path.kind >= Kind.FORK else self._departures.uses(depth, path.length)
                uses[node] = uses.get(node, 0.0) + rate * (reached - covered)
                stretch[node] = states[place + 1][1] if place + 1 < len(states) else 0, depth
                covered = reached
        cost, size = self._around.cost, self._around.state_bytes
        return {node: uses[node] * cost.between(*stretch[node]) / size for node in uses}

    def _states_on(self, end: Node) -> list[tuple[Node, int]]:
        """(node, depth) of the states on the way to a path's end, the deepest first."""
        depth, found = depth_of(end), []
        for node in path_up(end):
            if self._around.holds(node):
                found.append((node, depth))
            depth -= len(node.key)
        return found
