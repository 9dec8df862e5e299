"""How deep a hit is, to the token, and that it changes no bit of what follows."""

from __future__ import annotations

import os
from itertools import product

import pytest

PAGE = 1 if os.environ.get("K3_STRATEGY") == "no_buffer" else 16
B = int(os.environ.get("K3_GRID", "16"))
LENGTHS = (B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 3 * B)
NEW = 6


def kept(length: int) -> int:
    """Depth at which a prompt alone keeps its state: the last whole page that leaves a token to compute;
    where that is nothing, the whole page that the prompt is. Without buffers the state stands behind the
    last token that was computed, the answer's; see `without_buffers`."""
    return (length - 1) // PAGE * PAGE or length // PAGE * PAGE


def tails(common: int, length: int) -> int:
    """The deepest whole page of `common` tokens that leaves one of the prompt's `length` to compute."""
    return min(common, length - 1) // PAGE * PAGE


@pytest.mark.skipif(PAGE == 1, reason="without buffers states stand behind answers")
@pytest.mark.parametrize("kind", ["extend", "fork", "repeat"])
@pytest.mark.parametrize("first, second", list(product(LENGTHS, LENGTHS)))
def test_hits_are_as_deep_as_the_pages_allow(loop, told, prompt, first, second, kind):
    common = {"extend": min(first, second), "repeat": min(first, second), "fork": min(first, second) // 2}[
        kind
    ]
    if kind == "repeat" and first != second:
        pytest.skip("a repetition has one length")
    one = prompt(first, seed=1)
    two = one[:common] + prompt(second - common, seed=2)
    cold, nothing = told(two, NEW)
    assert nothing == 0
    loop.flush()
    _, nothing = told(one, NEW)
    assert nothing == 0

    warm, hit = told(two, NEW)
    reach = tails(common, second)
    # KV stays where a state was kept above it, so a fork below that has KV and no state: it plants one.
    want = kept(first) if kept(first) <= reach else 0
    assert (warm, hit) == (cold, want)
    again, deeper = told(two, NEW)
    planted = reach if 0 < reach < kept(first) and reach < kept(second) else kept(second)
    assert (again, deeper) == (cold, max(want, min(planted, tails(second, second))))
    last, deepest = told(two, NEW)
    assert (last, deepest) == (cold, min(kept(second), tails(second, second)))
    assert hit <= deeper <= deepest


@pytest.mark.skipif(PAGE != 1, reason="states stand at pages")
@pytest.mark.parametrize("first, more", list(product(LENGTHS, (1, 2, B))))
def test_without_buffers_a_turn_hits_where_the_answer_before_it_ended(loop, told, prompt, first, more):
    one = prompt(first, seed=1)
    (answer, _), nothing = told(one, NEW)
    two = [*one, *answer, *prompt(more, seed=3)]
    warm, hit = told(two, NEW)
    loop.flush()
    cold, _ = told(two, NEW)
    # The last token of an answer is written and never computed.
    assert nothing == 0 and (warm, hit) == (cold, first + NEW - 1)


@pytest.mark.parametrize("chunk", [1, 2])
def test_chunks_of_one_and_two_tokens_behind_a_hit(loop, told, prompt, chunk):
    depth = 4 * PAGE
    ids = prompt(depth + chunk, seed=4)
    cold, _ = told(ids, NEW)
    loop.flush()
    # Without buffers the state stands at the end of a prompt, with them a page before it at most.
    told(ids[: depth + (PAGE > 1)], 1)
    assert told(ids, NEW) == (cold, depth)


@pytest.mark.skipif(PAGE == 1, reason="no boundary is crossed in pages of one token")
def test_a_turn_hits_at_the_last_boundary_that_its_answer_crossed(loop, told, prompt):
    one = prompt(50, seed=5)
    (answer, _), _ = told(one, 100)
    two = [*one, *answer, *prompt(20, seed=6)]
    warm, hit = told(two, NEW)
    loop.flush()
    cold, _ = told(two, NEW)
    assert (warm, hit) == (cold, 128)
