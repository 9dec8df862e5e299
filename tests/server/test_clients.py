"""The demo's and the benchmarks' own clients against a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_k3.testing import streams
from sglang_k3.testing.bench_serving import BenchFailed, Workload, bench_serving, random_ids, shared_prefix
from sglang_k3.testing.streams import RequestFailed
from tests.server.conftest import Model
from tests.server.harness import Server

GREEDY = {"temperature": 0, "ignore_eos": True}
PROMPT = "def close(self):\n"


@pytest.fixture(scope="module")
def server(trained_k3: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--dtype", "bfloat16", "--max-total-tokens", "8192", "--max-mamba-cache-size", "64")
    flags += ("--page-size", "16", "--enable-cache-report")
    with Server(trained_k3.path, tmp_path_factory.mktemp("clients") / "log", *flags) as running:
        yield running


def test_three_interfaces_stream_the_same_text(server: Server) -> None:
    generated = streams.generate(server.url, PROMPT, {**GREEDY, "max_new_tokens": 12})
    completed = streams.complete(server.url, PROMPT, {**GREEDY, "max_tokens": 12})
    body = {"model": "k3", "prompt": PROMPT, "max_tokens": 12, **GREEDY}
    whole = streams.post(f"{server.url}/v1/completions", body)["choices"][0]["text"]
    assert generated.text == completed.text == whole and whole
    for answer in (generated, completed):
        assert answer.new_tokens == 12 and answer.prompt_tokens == generated.prompt_tokens > 0
        assert answer.ttft_s > 0 and answer.tpot_s > 0


def test_a_chat_stream_counts_its_tokens(server: Server) -> None:
    messages = [{"role": "user", "content": "x = x + 1\n" * 80}]
    first = streams.chat(server.url, messages, {**GREEDY, "max_tokens": 6})
    again = streams.chat(server.url, messages, {**GREEDY, "max_tokens": 6})
    assert first.new_tokens == 6 and first.cached_tokens == 0
    assert again.text == first.text and again.cached_tokens >= first.prompt_tokens - 80


def test_a_refusal_is_passed_on(server: Server) -> None:
    with pytest.raises(RequestFailed, match="400"):
        streams.generate(server.url, PROMPT, {"max_new_tokens": -5})
    with pytest.raises(RequestFailed, match="did not answer"):
        streams.generate("http://127.0.0.1:9", PROMPT, GREEDY)


@pytest.mark.parametrize("workload", [random_ids(40, 8), shared_prefix(128, 16, 8)], ids=lambda w: w.dataset)
def test_bench_serving_counts_every_token(server: Server, trained_k3: Model, workload: Workload) -> None:
    # Four prompts share a prefix: the first is cold, the second plants the state where they part.
    figures = bench_serving(server.url, trained_k3.path, workload, 2, 16)
    assert (figures.workload, figures.concurrency, figures.requests) == (workload.name, 2, 16)
    assert figures.new_tokens == 16 * 8
    assert figures.prompt_tokens >= 16 * 40
    # Random prompts of this client are runs of consecutive ids: two may begin alike.
    shares = workload.dataset == "generated-shared-prefix"
    assert (figures.cached_tokens > figures.prompt_tokens / 5) == shares
    assert figures.seconds > 0 and figures.median_tpot_ms > 0


def test_bench_serving_names_a_failure(trained_k3: Model) -> None:
    with pytest.raises(BenchFailed, match="bench_serving ended with"):
        bench_serving("http://127.0.0.1:9", trained_k3.path, Workload("x", "no-such-dataset", ()), 1, 4)
