"""Speculation changes no text: a speculating server against a plain one, in exact mode."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_k3.testing.server_process import draft_flags
from tests.server.conftest import TINY, Model
from tests.server.harness import Server, told

FLAGS = ("--dtype", "float32", "--enable-deterministic-inference", "--max-running-requests", "8")
FLAGS += ("--max-mamba-cache-size", "72", "--max-total-tokens", "32768", "--chunked-prefill-size", "256")
WAYS = {
    "extra_buffer": ("--page-size", "16"),
    "a ring of records, rows by a budget": ("--page-size", "16"),
    "anchored records": ("--page-size", "16"),
    "no_buffer": (
        "--page-size",
        "1",
        "--mamba-radix-cache-strategy",
        "no_buffer",
        "--disable-overlap-schedule",
    ),
    "lazy": ("--page-size", "16", "--mamba-radix-cache-strategy", "extra_buffer_lazy"),
    "page 64": (
        "--page-size",
        "64",
    ),
}
ENVIRONMENTS = {
    "anchored records": {"SGLANG_K3_RECORDS": "anchored"},
    "a ring of records, rows by a budget": {
        "SGLANG_K3_RECORDS": "ring",
        "SGLANG_RAGGED_VERIFY_MODE": "compact",
    },
}
IN_TEST = ("extra_buffer", "a ring of records, rows by a budget")
# New tokens of each answer.
TOKENS, ALL_TOKENS = 56, 200
SAMPLED = {
    "seeded": {"temperature": 0.9, "sampling_seed": 7},
    "top-k and top-p": {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "sampling_seed": 8},
    "penalised": {"temperature": 0.0, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    "repetition": {"temperature": 0.7, "repetition_penalty": 1.3, "sampling_seed": 9},
    "biased": {"temperature": 0.0, "logit_bias": {"50": 4.0, "60": -9.0}},
    "at least": {"temperature": 0.9, "min_new_tokens": 40, "sampling_seed": 10, "ignore_eos": False},
    "regex": {"temperature": 0.0, "regex": "(ab|cd){4,30}z", "ignore_eos": False},
    "stop string": {"temperature": 0.0, "stop": ["\n\n", "self"], "ignore_eos": False},
}


DRAFT = TINY.parent / "tiny-k3-dspark"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without overlap: with it SGLang counts each generated token one step late in penalties."""
    log = tmp_path_factory.mktemp("plain") / "server.log"
    with Server(TINY, log, *FLAGS, "--page-size", "16", "--disable-overlap-schedule") as server:
        yield server


@pytest.fixture(
    scope="module",
    params=[name if name in IN_TEST else pytest.param(name, marks=pytest.mark.verify) for name in WAYS],
)
def speculating(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("speculating") / "server.log"
    env = ENVIRONMENTS.get(request.param)
    with Server(TINY, log, *FLAGS, *WAYS[request.param], *draft_flags(DRAFT), env=env) as server:
        yield server


@pytest.fixture(
    scope="module", params=["some prompts", pytest.param("all prompts", marks=pytest.mark.verify)]
)
def asked(request: pytest.FixtureRequest, trained_k3: Model) -> tuple[list[list[int]], int]:
    """Prompts of 1 to 1,500 tokens, every other one in `make test`; and how many tokens each is answered."""
    every = request.param == "all prompts"
    return trained_k3.prompts[:: 1 if every else 2], ALL_TOKENS if every else TOKENS


def test_greedy_tokens_and_logprobs_are_the_plain_servers_bit_for_bit(
    plain: Server, speculating: Server, asked: tuple[list[list[int]], int]
) -> None:
    """Alone, then eight at once and from the prefix cache."""
    prompts, tokens = asked
    speculating.flush()
    want = [told(plain.answer(ids, tokens)) for ids in prompts]
    replies = [speculating.answer(ids, tokens) for ids in prompts]
    assert [told(reply) for reply in replies] == want
    assert all(reply["meta_info"]["spec_verify_ct"] > 0 for reply in replies)
    with ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda ids: speculating.answer(ids, tokens), prompts))
    assert [told(reply) for reply in again] == want
    assert sum(reply["meta_info"]["cached_tokens"] > 0 for reply in again) >= len(prompts) // 3


@pytest.mark.parametrize("kind", SAMPLED)
def test_a_seeded_penalised_biased_or_bound_text_is_the_plain_servers(
    plain: Server, speculating: Server, asked: tuple[list[list[int]], int], kind: str
) -> None:
    prompts, tokens = [ids for ids in asked[0] if 10 < len(ids) < 260][:4], asked[1]
    want = [told(plain.answer(ids, tokens, **SAMPLED[kind])) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda ids: told(speculating.answer(ids, tokens, **SAMPLED[kind])), prompts))
    assert got == want
    # The expression leaves little room for texts of their own.
    assert len({tuple(ids) for ids, *_ in want}) == len(prompts) or kind == "regex"


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_every_kind_of_request_in_one_batch_keeps_its_own_text(
    plain: Server, speculating: Server, trained_k3: Model, sampled: bool
) -> None:
    """Apart, because SGLang's sampler draws a seeded token by its rank as soon as one request of a batch is
    greedy or asks for top-k, and by its column otherwise; with or without speculation."""
    ids = next(ids for ids in trained_k3.prompts if len(ids) > 60)
    kinds = [
        options
        for options in ({}, *SAMPLED.values())
        if (options.get("temperature", 0.0) > 0) == sampled and "top_k" not in options
    ]
    want = [told(plain.answer(ids, TOKENS, **kind)) for kind in kinds]
    with ThreadPoolExecutor(len(kinds)) as pool:
        got = list(pool.map(lambda kind: told(speculating.answer(ids, TOKENS, **kind)), kinds))
    assert got == want and len(kinds) > 2


def test_the_answer_says_how_much_was_accepted_and_what_a_budget_spent(
    speculating: Server, asked: tuple[list[list[int]], int], request: pytest.FixtureRequest
) -> None:
    budgeted = "rows by a budget" in request.node.name
    metas = [speculating.answer(ids, TOKENS)["meta_info"] for ids in asked[0] if len(ids) > 20]
    for meta in metas:
        assert meta["completion_tokens"] == TOKENS
        # The first token comes from the prefill.
        assert meta["spec_verify_ct"] * meta["spec_accept_length"] == pytest.approx(TOKENS, abs=2)
        if "verify_budget" in meta:
            [spent] = meta["verify_budget"]
            # With overlap a last step is under way when the answer is complete.
            assert 0 <= spent["steps"] - meta["spec_verify_ct"] <= 1
            assert spent["steps"] <= spent["rows"] <= 8 * spent["steps"]
    told = ["verify_budget" in meta for meta in metas]
    assert all(told) if budgeted else not any(told)
    steps = sum(meta["spec_verify_ct"] for meta in metas)
    # How many rows are verified, and so accepted at most, is the budget's choice.
    assert steps < (TOKENS - 1) * len(metas), "no draft was accepted"


def test_a_full_pool_waits_and_every_request_is_served(speculating: Server, trained_k3: Model) -> None:
    prompts = [ids[:40] for ids in trained_k3.prompts if len(ids) >= 40] * 2
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(lambda ids: speculating.answer(ids, 20), prompts))
    half = len(prompts) // 2
    assert [told(reply) for reply in replies[:half]] == [told(reply) for reply in replies[half:]]
