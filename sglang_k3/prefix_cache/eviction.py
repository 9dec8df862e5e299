"""Which cached KDA state gives its slot to another: one interface, chosen by `--radix-eviction-policy`.

`value`, `marconi` and `path-lru` are ours. With SGLang's own names (`lru`, its default, `lfu`, ...) states go
in SGLang's order: the one whose own use is longest ago; the name then orders KV, as in SGLang.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

OURS = ("value", "marconi", "path-lru")

Node = Any
"""SGLang's UnifiedTreeNode: `parent`, `children`, `key` (tokens between parent and node), `id`."""


@dataclass(frozen=True)
class PrefillCost:
    """What it takes to compute tokens behind a prefix: seconds = per_token · tokens + per_pair · tokens ·
    depth, depth being the mean number of tokens that these look back at."""

    per_token: float
    per_pair: float

    def between(self, start: int, end: int) -> float:
        """Seconds to compute tokens start..end with the state at `start` at hand."""
        return self.per_token * (end - start) + self.per_pair * (end * end - start * start) / 2


UNMEASURED = PrefillCost(1.0, 0.0)
"""Every token costs the same."""


@dataclass(frozen=True)
class Surroundings:
    """What a policy may ask of the cache. holds: whether a node has a state. cost: measured at start.
    state_bytes: of one state; token_bytes: of one token's KV."""

    holds: Callable[[Node], bool]
    cost: PrefillCost
    state_bytes: int
    token_bytes: int


class Eviction(ABC):
    """Hears what happens to states, and names the next one to go.

    Every rank of a group runs its own; they must agree, so nothing here may depend on the time of day.
    """

    refreshes_path = False
    """Whether a hit makes every state on its path a recent one, not the used one alone."""

    def started(self, request: Any, node: Node | None, kv: int) -> None:  # noqa: B027
        """A request starts whose first `kv` tokens had their KV in the tree, ending at `node` (None:
        nowhere)."""

    def kept(self, request: Any, node: Node) -> None:  # noqa: B027
        """The request's tokens are in the tree up to `node`, which holds its state."""

    def dropped(self, node: Node) -> None:  # noqa: B027
        """The node leaves the tree; its parent is still known."""

    def clear(self) -> None:  # noqa: B027
        """The tree was emptied."""

    @abstractmethod
    def victim(self, states: Sequence[Node]) -> Node:
        """One of the nodes, which hold the states that may go; the one whose use is longest ago comes
        first."""


class LeastRecent(Eviction):
    """The textbook's LRU: whatever lies on a used path is used."""

    refreshes_path = True

    def victim(self, states: Sequence[Node]) -> Node:
        return states[0]


def path_up(node: Node) -> Iterator[Node]:
    """The node and what is above it, without the root."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def depth_of(node: Node) -> int:
    """Tokens from the root to the node's end."""
    return sum(len(above.key) for above in path_up(node))


def make(name: str, config: dict[str, Any] | None, around: Surroundings) -> Eviction | None:
    """None leaves the order to SGLang. Raises ValueError for a config that the policy does not know."""
    from sglang_k3.prefix_cache.eviction_marconi import Marconi
    from sglang_k3.prefix_cache.eviction_value import ByValue

    if name not in OURS:
        return None
    check(name, config)
    if name == "marconi":
        return Marconi(around, **(config or {}))
    return ByValue(around) if name == "value" else LeastRecent()


def check(name: str, config: dict[str, Any] | None) -> None:
    """Raises ValueError for what `--radix-eviction-policy-config` must not hold beside one of our names."""
    for key, value in (config or {}).items():
        if name != "marconi" or key != "alpha":
            allowed = "alpha, a number from 0" if name == "marconi" else "nothing"
            raise ValueError(
                f"--radix-eviction-policy-config has {key!r}, which --radix-eviction-policy {name} does not "
                f"know: it takes {allowed}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ValueError(
                f"--radix-eviction-policy-config alpha is {value!r}: pass a number from 0 (recency alone)"
            )
