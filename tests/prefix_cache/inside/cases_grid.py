"""How deep a hit is, to the token, and that it changes no bit of what follows."""

from __future__ import annotations

import os
from itertools import product

import pytest

PAGE = 1 if os.environ.get("K3_STRATEGY") == "no_buffer" else 16
B = int(os.environ.get("K3_GRID", "16"))
LENGTHS = (B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 3 * B)
NEW = 6


class Paper:
    """The cache on paper: the keys of all kept states, by the rules in prefix_cache/checkpoints.py."""

    def __init__(self):
        self.keys: set[tuple] = set()

    def send(self, ids: list[int]) -> int:
        """The tokens that this prompt finds."""
        usable = ids[: (len(ids) - 1) // PAGE * PAGE]
        kv = max((self._common(key, usable) for key in self.keys), default=0)
        hit = max((len(key) for key in self.keys if list(key) == usable[: len(key)]), default=0)
        opening, last, end = (max(0, len(ids) - behind) // PAGE * PAGE for behind in (33, 1, 0))
        depth = next((depth for depth in (opening, last, end) if depth > hit), hit)
        if max(hit + 1, 64) <= kv < depth:
            own = next((depth for depth in (opening, last, end) if depth > kv), kv)
            self.keys.add(tuple(ids[:kv]))  # the fork; by our policies in a chunk of its own
            depth = own if os.environ.get("K3_EVICTION") == "value" else kv
        if depth > hit:
            self.keys.add(tuple(ids[:depth]))
        return hit

    def answered(self, ids: list[int], answer: tuple) -> None:
        """A boundary that the answer crossed; its last token is never computed."""
        for depth in range(64, len(ids) + len(answer), 64):
            if depth > len(ids):
                self.keys.add((*ids, *answer)[:depth])

    @staticmethod
    def _common(key: tuple, ids: list[int]) -> int:
        same = next(
            (i for i, (a, b) in enumerate(zip(key, ids, strict=False)) if a != b), min(len(key), len(ids))
        )
        return same // PAGE * PAGE


@pytest.mark.skipif(PAGE == 1, reason="without buffers states stand behind answers")
@pytest.mark.parametrize(
    "first, second, kind",
    [(first, second, kind) for first, second in product(LENGTHS, LENGTHS) for kind in ("extend", "fork")]
    + [(length, length, "repeat") for length in LENGTHS],
)
def test_hits_are_as_deep_as_the_pages_allow(loop, told, prompt, first, second, kind):
    if kind == "fork" and B < 64:
        first, second = 4 * first, 4 * second  # a fork counts from 64 tokens on
    common = min(first, second) * 3 // (4 if kind == "fork" else 3)
    one = prompt(first, seed=1)
    two = one[:common] + prompt(second - common, seed=2)
    cold, nothing = told(two, NEW)
    assert nothing == 0
    loop.flush()
    paper, hits = Paper(), []
    for ids in (one, two, two, two):
        text, hit = told(ids, NEW)
        assert hit == paper.send(ids)
        paper.answered(ids, text[0])
        if ids is two:
            assert text == cold
            hits.append(hit)
    assert hits == sorted(hits)
    # Where a fork came first, the third hit stands in front of the answer's opening; else at the last token.
    assert hits[-1] >= (second - 1) // PAGE * PAGE - 2 * PAGE


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
    # Without buffers the state stands at the end of a prompt; with them so far before it.
    told([*ids[:depth], *prompt(33 if PAGE > 1 else 0, seed=5)], 1)
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
