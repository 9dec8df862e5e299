"""The policies' choices on small trees drawn by hand, and what they learn."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_k3.prefix_cache import eviction
from sglang_k3.prefix_cache.eviction import PrefillCost, Surroundings
from sglang_k3.prefix_cache.reuse import Departures, Kind, Returns, bin_of


@dataclass(eq=False)
class Node:
    parent: Node | None
    length: int
    held: bool = True
    children: dict[int, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.parent.children[len(self.parent.children)] = self

    @property
    def key(self) -> range:
        return range(self.length)


AROUND = Surroundings(
    holds=lambda node: node.held, cost=PrefillCost(1.0, 0.001), state_bytes=1000, token_bytes=1
)


def request(tokens: int = 0) -> Any:
    return SimpleNamespace(origin_input_ids=range(tokens))


class Asked:
    """SimpleNamespace cannot be a key of a weak dictionary."""

    def __init__(self, tokens: int) -> None:
        self.origin_input_ids = range(tokens)


def turn(policy: eviction.Eviction, found: Node | None, kv: int, end: Node) -> None:
    """A request whose first kv tokens, ending at `found`, were cached, and that leaves a state at `end`."""
    one = Asked(eviction.depth_of(end))
    policy.started(one, found, kv)
    policy.kept(one, end)


def test_cost_counts_tokens_and_what_they_look_back_at() -> None:
    cost = PrefillCost(2.0, 0.5)
    assert cost.between(0, 4) == 2 * 4 + 0.5 * 8
    assert cost.between(0, 10) == pytest.approx(cost.between(0, 6) + cost.between(6, 10))
    assert cost.between(100, 110) > cost.between(0, 10)


def test_the_state_that_saves_least_goes_first() -> None:
    root = Node(None, 0)
    long, short = Node(root, 900), Node(root, 60)
    policy = eviction.make("value", None, AROUND)
    assert policy is not None
    turn(policy, None, 0, long)
    turn(policy, None, 0, short)
    assert policy.victim([long, short]) is short
    # By recency alone it would be the other one.
    lru = eviction.make("path-lru", None, AROUND)
    assert lru is not None and lru.victim([long, short]) is long


def test_a_state_is_worth_more_once_the_one_above_it_is_gone() -> None:
    root = Node(None, 0)
    upper = Node(root, 500)
    lower = Node(upper, 100)
    other = Node(root, 250)
    policy = eviction.make("value", None, AROUND)
    assert policy is not None
    turn(policy, None, 0, other)
    turn(policy, None, 0, upper)
    turn(policy, upper, 500, lower)
    assert policy.victim([other, upper, lower]) is upper, "the end serves the next turn, and edits are rare"
    upper.held = False
    assert policy.victim([other, lower]) is other, "600 tokens are behind it now"


def test_a_path_that_came_back_is_kept_before_one_that_did_not() -> None:
    root = Node(None, 0)
    policy = eviction.make("value", None, AROUND)
    assert policy is not None
    session = Node(root, 300)
    turn(policy, None, 0, session)
    for _ in range(6):
        deeper = Node(session, 20)
        turn(policy, session, eviction.depth_of(session), deeper)
        session.held, session = False, deeper
    strangers = [Node(root, 420) for _ in range(8)]
    for stranger in strangers:
        turn(policy, None, 0, stranger)
    assert policy.victim([session, *strangers]) in strangers


def test_a_shared_beginning_is_not_taken_for_an_edit() -> None:
    """Many prompts part behind the same instructions: the paths that they leave are as good as before."""
    from sglang_k3.prefix_cache.eviction_value import ByValue

    root = Node(None, 0)
    policy = ByValue(AROUND)
    shared = Node(root, 100, held=False)
    ends = [Node(shared, 400) for _ in range(5)]
    for end in ends:
        turn(policy, shared, 100, end)
    kinds = [path.kind for path in policy._paths]
    assert kinds.count(Kind.LEFT) == 0 and kinds.count(Kind.NEW) == 5 and Kind.SHARED in kinds


def test_an_edit_makes_the_end_that_it_left_worth_less() -> None:
    root = Node(None, 0)
    policy = eviction.make("value", None, AROUND)
    assert policy is not None
    begun = Node(root, 300, held=False)
    left, new = Node(begun, 100), Node(begun, 100)
    turn(policy, None, 0, left)
    turn(policy, begun, 300, new)
    assert policy.victim([new, left]) is left


def test_a_leaf_that_was_dropped_leaves_its_path_to_the_parent() -> None:
    from sglang_k3.prefix_cache.eviction_value import ByValue

    root = Node(None, 0)
    policy = ByValue(AROUND)
    upper = Node(root, 200)
    lower = Node(upper, 200)
    turn(policy, None, 0, lower)
    lower.held = False
    policy.dropped(lower)
    (path,) = policy._paths
    assert (path.end, path.length) == (upper, 400)
    policy.dropped(upper)
    assert not policy._paths


def test_each_eviction_leaves_the_worths_that_counting_from_the_start_gives() -> None:
    """A random tree, evicted state by state: neighbours are brought up to date, not everything."""
    import random

    from sglang_k3.prefix_cache.eviction_value import ByValue

    draw = random.Random(3)
    policy, root = ByValue(AROUND), Node(None, 0)
    nodes = [root]
    for _ in range(60):
        above = draw.choice(nodes)
        made = Node(above, draw.randrange(16, 300), held=draw.random() < 0.8)
        nodes.append(made)
        turn(policy, above if above is not root else None, eviction.depth_of(above), made)
    states = [node for node in nodes if node.held and node is not root]
    for _ in range(30):
        going = policy.victim(states)
        states.remove(going)
        going.held = False
        if not going.children:
            policy.dropped(going)
            going.parent.children = {k: v for k, v in going.parent.children.items() if v is not going}
        policy._value_paths()
        worths = {node: policy.worth(node) for node in states}
        policy._stale = True
        policy._value_paths()
        assert worths == pytest.approx({node: policy.worth(node) for node in states})


def test_marconi_weighs_recency_against_what_is_saved() -> None:
    root = Node(None, 0)
    old, new = Node(root, 900), Node(root, 60)

    def victim(alpha: float) -> Node:
        policy = eviction.make("marconi", {"alpha": alpha}, AROUND)
        assert policy is not None
        turn(policy, None, 0, old)
        turn(policy, None, 0, new)
        return policy.victim([old, new])

    assert victim(0.0) is old
    assert victim(4.0) is new


def test_marconi_leaves_forks() -> None:
    root = Node(None, 0)
    fork = Node(root, 10)
    ends = [Node(fork, 900), Node(fork, 800)]
    policy = eviction.make("marconi", None, AROUND)
    assert policy is not None
    for end in ends:
        turn(policy, None, 0, end)
    assert policy.victim([fork, *ends]) in ends
    assert policy.victim([fork]) is fork


def test_sglangs_names_leave_the_order_to_sglang() -> None:
    assert eviction.make("lru", None, AROUND) is None
    assert eviction.make("slru", {"protected_threshold": 4}, AROUND) is None


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("value", {"alpha": 1.0}, "it takes nothing"),
        ("marconi", {"beta": 1.0}, "'beta'"),
        ("marconi", {"alpha": -1}, "alpha is -1"),
        ("marconi", {"alpha": "much"}, "alpha is 'much'"),
        ("marconi", {"alpha": True}, "alpha is True"),
    ],
)
def test_a_wrong_config_is_refused_by_name(name, config, said) -> None:
    with pytest.raises(ValueError, match=said):
        eviction.make(name, config, AROUND)


def test_returns_are_learned_by_kind_and_age() -> None:
    returns = Returns()
    for _ in range(20):
        returns.came_back(Kind.ALIVE, 4)
        returns.gone(Kind.NEW, 60)
    indices = returns.indices([])
    assert indices[Kind.ALIVE, bin_of(1)] > 4 * indices[Kind.NEW, bin_of(1)]
    # Behind the age at which all have come back, nothing more is expected soon.
    assert indices[Kind.ALIVE, bin_of(3)] > 2 * indices[Kind.ALIVE, bin_of(40)]


def test_paths_still_waiting_count_as_not_having_come_back() -> None:
    returns = Returns()
    for _ in range(5):
        returns.came_back(Kind.NEW, 10)
    before = returns.indices([])[Kind.NEW, bin_of(20)]
    after = returns.indices([(Kind.NEW, 200)] * 30)[Kind.NEW, bin_of(20)]
    assert after < before / 2


def test_departures_are_learned() -> None:
    departures = Departures()
    for _ in range(60):
        departures.left(1000, 1000)
    for _ in range(20):
        departures.left(900, 1000)
    assert departures.beyond(1000, 1000) == pytest.approx(0.75, abs=0.03)
    assert departures.beyond(833, 1000) == pytest.approx(1.0, abs=0.03)
    assert departures.beyond(0, 1000) == pytest.approx(1.0)
    depths = [departures.uses(depth, 1000) for depth in range(0, 1001, 50)]
    assert depths == sorted(depths, reverse=True), "whoever leaves behind a state leaves behind the one above"
