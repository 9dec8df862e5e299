"""The offline ideal on traces small enough to see."""

from __future__ import annotations

import itertools
import random

from benchmarks.prefix_cache_ideal import ideal
from benchmarks.prefix_cache_traces import Request, Trace

PAGE = 4


def trace(*prompts: list[int]) -> Trace:
    return Trace("small", "", [Request(str(number), ids, [0]) for number, ids in enumerate(prompts)])


def text(base: int, length: int) -> list[int]:
    return [100 * base + place for place in range(length)]


def test_a_prompt_that_is_repeated_is_found_up_to_the_page_in_front_of_its_last_token() -> None:
    found = ideal(trace(text(1, 16), text(1, 16)), slots=1, page=PAGE)
    assert (found.cached, found.unlimited, found.exact) == (12, 12, True)


def test_one_slot_holds_one_of_two_sessions() -> None:
    one, two = text(1, 40), text(2, 20)
    asked = trace(one, two, [*one, 1], [*two, 1])
    assert ideal(asked, slots=1, page=PAGE).cached == 40
    assert ideal(asked, slots=2, page=PAGE).cached == 60


def test_a_slot_serves_sessions_that_do_not_overlap() -> None:
    one, two = text(1, 40), text(2, 20)
    assert ideal(trace(one, [*one, 1], two, [*two, 1]), slots=1, page=PAGE).cached == 60


def test_no_slots_find_nothing() -> None:
    assert ideal(trace(text(1, 16), text(1, 16)), slots=0, page=PAGE).cached == 0


def brute(asked: Trace, slots: int) -> int:
    """Every choice of what to keep: a state is (the tokens in front of it)."""

    def after(kept: frozenset[tuple[int, ...]], rest: list[Request]) -> int:
        if not rest:
            return 0
        ids, best = rest[0].prompt, -1
        usable = [len(s) for s in kept if len(s) < len(ids) and tuple(ids[: len(s)]) == s]
        for start in {0, *usable}:
            made = {tuple(ids[:end]) for end in range(PAGE, len(ids) + 1, PAGE) if end > start}
            pool = sorted(kept | made)
            for count in range(min(slots, len(pool)) + 1):
                for chosen in itertools.combinations(pool, count):
                    best = max(best, start + after(frozenset(chosen), rest[1:]))
        return best

    return after(frozenset(), asked.requests)


def test_it_is_what_trying_everything_finds() -> None:
    draw = random.Random(1)
    beginnings = [text(1, 8), text(2, 8), [*text(1, 4), *text(3, 4)]]
    seen = set()
    for _ in range(6):
        asked = trace(*([*draw.choice(beginnings), draw.randrange(2)] for _ in range(4)))
        for slots in (1, 2):
            found = ideal(asked, slots, PAGE)
            assert found.exact
            assert found.cached == brute(asked, slots)
            seen.add((slots, found.cached))
    assert len(seen) > 3
