"""The most prompt tokens that any policy could have found, knowing every request beforehand.

States may stand at every whole page that a request computes, and each slot may hold any of them at any time.
The choice is an integer program: which places to keep over which requests, so that never more than the slots
are held and each request starts from one of them. scipy's HiGHS solves its relaxation, which can only be
above the best possible; `exact` says whether it is the best possible itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import coo_array

from benchmarks.prefix_cache_traces import Trace


@dataclass(frozen=True)
class Ideal:
    """cached: tokens over the whole trace. unlimited: with a slot for every state."""

    cached: float
    unlimited: int
    exact: bool


def ideal(trace: Trace, slots: int, page: int) -> Ideal:
    """slots: states that can be held while a request runs."""
    places, unlimited = _places(trace, page)
    costs: list[float] = []
    rows: list[tuple[dict[int, float], float]] = []
    held: dict[int, dict[int, float]] = {}
    source: dict[int, dict[int, float]] = {}
    uses: list[tuple[int, int, int]] = []
    # Per place: `keep` over each stretch between two requests that pass it, `use` at the stretch's end.
    entered: list[tuple[int, int | None, int, int]] = []
    for depth, passing in places:
        before: int | None = None
        for (first, _), (then, able) in pairwise(passing):
            keep, use = len(costs), len(costs) + 1
            costs += [0.0, -float(depth) if able else 0.0]
            for between in range(first + 1, then):
                held.setdefault(between, {})[keep] = 1.0
            held.setdefault(then, {})[keep] = 1.0
            rows.append(({use: 1.0, keep: -1.0}, 0.0))
            if able:
                source.setdefault(then, {})[use] = 1.0
                uses.append((then, depth, use))
            entered.append((keep, before, first, depth))
            before = keep
    at: dict[int, list[tuple[int, int]]] = {}
    for request, depth, use in uses:
        at.setdefault(request, []).append((depth, use))
    for keep, before, first, depth in entered:
        if before is None:
            continue
        # It was there already, or the request computed it again: started from something shallower.
        deeper = {use: 1.0 for other, use in at.get(first, ()) if other >= depth}
        rows.append(({keep: 1.0, before: -1.0, **deeper}, 1.0))
    rows += [(row, float(slots)) for row in held.values()]
    rows += [(row, 1.0) for row in source.values()]
    if not costs:
        return Ideal(0.0, unlimited, True)
    entries = [
        (number, column, value) for number, (row, _) in enumerate(rows) for column, value in row.items()
    ]
    lines, columns, values = zip(*entries, strict=True)
    matrix = coo_array((values, (lines, columns)), shape=(len(rows), len(costs))).tocsr()
    bounds = LinearConstraint(matrix, -np.inf, np.array([limit for _, limit in rows]))  # type: ignore[arg-type]
    for integral in (True, False):
        found = milp(
            np.array(costs),
            integrality=np.full(len(costs), int(integral)),
            bounds=(0, 1),
            constraints=bounds,
            options={"time_limit": 60.0},
        )
        if found.status == 0:
            return Ideal(-float(found.fun), unlimited, integral)
    raise RuntimeError(f"the ideal of {trace.name} with {slots} slots was not found: {found.message}")


def _places(trace: Trace, page: int) -> tuple[list[tuple[int, list[tuple[int, bool]]]], int]:
    """(depth, requests that pass it in order and whether they can start there) of the places where two
    requests part or one goes on from another's end, and the tokens found with all of them kept.

    A state between two such places could stand at the deeper one and serve the same requests.
    """
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    passing: dict[int, list[int]] = {}
    depths: dict[int, int] = {}
    unlimited = 0
    for index, request in enumerate(trace.requests):
        node, found = 0, 0
        usable = (len(request.prompt) - 1) // page
        ids = [*request.prompt, *request.answer]
        # The last token of an answer is written and never computed.
        for number in range((len(ids) - 1) // page):
            block = tuple(ids[number * page : (number + 1) * page])
            child = numbers.get((node, block))
            if child is None:
                child = numbers[node, block] = len(numbers) + 1
                depths[child] = (number + 1) * page
            elif number < usable and found == number * page:
                found = (number + 1) * page
            passing.setdefault(child, []).append(index)
            node = child
        unlimited += found
    # Places that the same requests pass and can start at lie on one way: the deepest stands for all.
    usable_at = [(len(request.prompt) - 1) // page * page for request in trace.requests]
    deepest: dict[tuple[tuple[int, bool], ...], int] = {}
    for node, requests in passing.items():
        # Who ends in front of a place, or passes it in its answer, can leave a state there but not find one.
        events = tuple((index, usable_at[index] >= depths[node]) for index in requests)
        if any(able for _, able in events[1:]) and depths[node] > depths.get(deepest.get(events, 0), 0):
            deepest[events] = node
    return [(depths[node], list(events)) for events, node in deepest.items()], unlimited
