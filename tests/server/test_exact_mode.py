"""Exact mode on real servers: one answer, to the bit, however a request is scheduled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from sglang_k3.models.reference import ReferenceModel
from tests.server.conftest import Model, must_hit
from tests.server.harness import Reply, Server
from tests.server.margin import check

NEW_TOKENS = 12
FLAGS = ("--dtype", "float32", "--enable-deterministic-inference", "--max-total-tokens", "16384")
FLAGS += ("--max-mamba-cache-size", "200", "--max-running-requests", "8")

# Chunk size, page size and cache strategy of each server; all but the last run with overlap scheduling.
CONFIGS: dict[str, tuple[str, ...]] = {
    "chunk 64, page 16, extra_buffer": (
        *("--chunked-prefill-size", "64", "--page-size", "16"),
        *("--mamba-radix-cache-strategy", "extra_buffer"),
    ),
    "chunk 96, page 16, extra_buffer_lazy, mixed": (
        *("--chunked-prefill-size", "96", "--page-size", "16"),
        *("--mamba-radix-cache-strategy", "extra_buffer_lazy", "--enable-mixed-chunk"),
    ),
    "chunk 512, page 16, retracting": (*("--chunked-prefill-size", "512", "--page-size", "16"),),
    "chunk 100, page 1, no_buffer, no overlap": (
        *("--chunked-prefill-size", "100", "--page-size", "1"),
        *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
    ),
}
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}


@dataclass(frozen=True)
class Recorded:
    """One server's answers: eight requests at once on a cold cache, then again on a warm one."""

    together: list[Reply]
    warm: list[Reply]
    log: str


def record(server: Server, prompts: list[list[int]]) -> Recorded:
    server.flush()
    together = server.generate_all(prompts, NEW_TOKENS, at_once=8, prompt_logprobs=True)
    server.flush()
    server.generate_all(prompts, NEW_TOKENS, at_once=8)
    warm = server.generate_all(prompts, NEW_TOKENS, at_once=3)
    return Recorded(together, warm, server.tail(1_000_000))


@pytest.fixture(scope="module")
def first_server(
    model: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[Reply], Recorded]]:
    """The baseline: each prompt alone on a cold cache; and that server's other answers."""
    log = tmp_path_factory.mktemp("exact") / "first.log"
    with Server(model.path, log, *FLAGS, *next(iter(CONFIGS.values()))) as server:
        alone = server.generate_all(model.prompts, NEW_TOKENS, at_once=1, prompt_logprobs=True)
        yield alone, record(server, model.prompts)


@pytest.fixture(scope="module")
def alone(first_server: tuple[list[Reply], Recorded]) -> list[Reply]:
    return first_server[0]


@pytest.fixture(scope="module", params=CONFIGS)
def recorded(
    request: pytest.FixtureRequest,
    model: Model,
    first_server: tuple[list[Reply], Recorded],
    tmp_path_factory: pytest.TempPathFactory,
) -> Recorded:
    if request.param == next(iter(CONFIGS)):
        return first_server[1]
    log = tmp_path_factory.mktemp("exact") / "server.log"
    env = RETRACT if "retracting" in request.param else {}
    with Server(model.path, log, *FLAGS, *CONFIGS[request.param], env=env) as server:
        answers = record(server, model.prompts)
    if env:
        assert "retract" in answers.log.lower(), "no request was retracted: the test proves nothing"
    return answers


def test_the_greedy_tokens_and_logprobs_are_the_reference_models(model: Model, alone: list[Reply]) -> None:
    oracle = ReferenceModel.from_checkpoint(model.path, torch.float64)
    verdicts = [
        check(oracle, prompt, reply.ids, reply.logprobs)
        for prompt, reply in zip(model.prompts, alone, strict=True)
    ]
    excused = sum(verdict.excused for verdict in verdicts)
    compared = sum(verdict.compared for verdict in verdicts)
    error = max(verdict.largest_logprob_error for verdict in verdicts)
    print(f"{compared} positions compared, {excused} excused, largest logprob error {error:.2e}")
    assert [verdict.wrong for verdict in verdicts] == [()] * len(model.prompts)
    assert compared >= 0.9 * len(model.prompts) * NEW_TOKENS
    assert error < 1e-3


def test_the_prompts_do_not_answer_alike(alone: list[Reply]) -> None:
    """Equality below would prove nothing on a model whose answers do not depend on its input."""
    assert len({reply.ids for reply in alone}) == len(alone)


def test_eight_at_once_give_the_bits_of_one_alone(alone: list[Reply], recorded: Recorded) -> None:
    for single, together in zip(alone, recorded.together, strict=True):
        assert together.ids == single.ids
        assert together.logprobs == single.logprobs
        assert together.prompt_logprobs == single.prompt_logprobs


def test_a_prefix_hit_gives_the_bits_of_a_cold_run(alone: list[Reply], recorded: Recorded) -> None:
    lengths = [len(single.prompt_logprobs) + 1 for single in alone]
    assert sum(map(must_hit, lengths)) >= 6
    for length, warm in zip(lengths, recorded.warm, strict=True):
        assert warm.cached > 0 or not must_hit(length), f"a prompt of {length} tokens missed"
    for single, warm in zip(alone, recorded.warm, strict=True):
        assert warm.ids == single.ids
        assert warm.logprobs == single.logprobs
