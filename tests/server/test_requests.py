"""Requests that cannot be served are refused one by one; the server and its other requests live on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import Server

POOL = 2048
CONTEXT = 4096


@pytest.fixture(scope="module")
def server(bf16_k3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A small pool, bf16 and packed experts: about three long requests fill it."""
    flags = ("--context-length", str(CONTEXT), "--max-total-tokens", str(POOL), "--page-size", "16")
    flags += ("--max-mamba-cache-size", "24", "--chunked-prefill-size", "256")
    with Server(bf16_k3, tmp_path_factory.mktemp("requests") / "log", *flags) as running:
        yield running


def answers(server: Server) -> bool:
    return len(server.generate([1, 2, 3], 4).ids) == 4


def test_completions_and_generate_give_the_same_text(server: Server) -> None:
    prompt = "def main():"
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    plain = server.post("/generate", {"text": prompt, "sampling_params": sampling}).json()["text"]
    body = {"model": "k3", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    completion = server.post("/v1/completions", body).json()
    assert completion["choices"][0]["text"] == plain
    assert completion["usage"]["completion_tokens"] == 16
    assert len(plain) > 0


def test_a_prompt_over_the_context_is_refused_with_both_numbers(server: Server) -> None:
    response = server.post("/generate", {"input_ids": [7] * (CONTEXT + 5), "sampling_params": {}})
    assert response.status_code == 400
    assert str(CONTEXT) in response.text and str(CONTEXT + 5) in response.text
    assert answers(server)


def test_a_prompt_over_the_pool_is_refused_and_the_server_lives(server: Server) -> None:
    sampling = {"max_new_tokens": 4}
    response = server.post("/generate", {"input_ids": [7] * (POOL + 100), "sampling_params": sampling})
    assert response.status_code == 400, response.text
    assert answers(server)


def test_more_requests_than_the_pool_holds_wait_and_are_all_served(server: Server) -> None:
    prompts = [[start] * 700 for start in range(12)]
    replies = server.generate_all(prompts, 20, at_once=12)
    assert [len(reply.ids) for reply in replies] == [20] * 12
    assert [reply.finish for reply in replies] == ["length"] * 12


def test_an_image_is_refused_with_a_clear_error(server: Server) -> None:
    pixel = (
        "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
        "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    )
    body = {
        "model": "k3",
        "max_tokens": 4,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what is this?"},
                    {"type": "image_url", "image_url": {"url": pixel}},
                ],
            }
        ],
    }
    chat = server.post("/v1/chat/completions", body)
    assert chat.status_code == 400, chat.text
    assert "image" in chat.text.lower()
    plain = server.post("/generate", {"text": "x", "image_data": pixel, "sampling_params": {}})
    assert plain.status_code == 400, plain.text
    assert "image" in plain.text.lower()
    assert answers(server)


def test_an_empty_prompt_is_refused(server: Server) -> None:
    response = server.post("/generate", {"input_ids": [], "sampling_params": {"max_new_tokens": 2}})
    assert response.status_code == 400, response.text
    assert answers(server)


def test_a_token_outside_the_vocabulary_is_refused(server: Server) -> None:
    response = server.post("/generate", {"input_ids": [1, 10**6], "sampling_params": {"max_new_tokens": 2}})
    assert response.status_code == 400, response.text
    assert answers(server)


def test_an_aborted_stream_leaves_the_others_alone(server: Server) -> None:
    import requests

    expected = server.generate([9] * 100, 32)
    body = {
        "input_ids": [8] * 300,
        "stream": True,
        "sampling_params": {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0},
    }
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=60) as stream:
        next(stream.iter_lines())
    assert server.generate([9] * 100, 32).ids == expected.ids
