"""Streaming requests to a server, with the times that a reader of the stream sees."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import requests

TIMEOUT_S = 300


class RequestFailed(RuntimeError):
    """The server refused a request or did not answer; the message says what it said."""


@dataclass(frozen=True)
class Streamed:
    """What came back. ttft_s: to the first piece; tpot_s: between tokens behind it, 0 for a single one.

    ids (from /generate alone): the new tokens. verify_steps: of a speculating server, else 0.
    """

    text: str
    reasoning: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    ttft_s: float
    tpot_s: float
    ids: tuple[int, ...] = ()
    verify_steps: int = 0


def post(url: str, body: dict[str, Any]) -> Any:
    """The answer's JSON. Raises RequestFailed."""
    with _request(url, body) as response:
        return response.json()


def generate(url: str, prompt: str, sampling: dict[str, Any]) -> Streamed:
    """/generate; sampling: its sampling_params."""
    return _generate(url, {"text": prompt, "sampling_params": sampling})


def generate_ids(url: str, prompt: list[int], sampling: dict[str, Any]) -> Streamed:
    """/generate with a prompt of token ids."""
    return _generate(url, {"input_ids": prompt, "sampling_params": sampling})


def _generate(url: str, body: dict[str, Any]) -> Streamed:
    clock = _Clock()
    last: dict[str, Any] = {}
    # Every event repeats the whole text so far.
    for event in _events(f"{url}/generate", body):
        clock.tick()
        last = event
    meta = last["meta_info"]
    answer = clock.streamed(
        last["text"], "", meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]
    )
    return replace(answer, ids=tuple(last["output_ids"]), verify_steps=meta.get("spec_verify_ct") or 0)


def complete(url: str, prompt: str | list[int], options: dict[str, Any]) -> Streamed:
    """/v1/completions, with a text or token ids; options: further fields of the body."""
    return _openai(f"{url}/v1/completions", {"prompt": prompt, **options})


def chat(url: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> Streamed:
    """/v1/chat/completions; options: further fields of the body."""
    return _openai(f"{url}/v1/chat/completions", {"messages": messages, **options})


def _openai(url: str, body: dict[str, Any]) -> Streamed:
    clock = _Clock()
    text: list[str] = []
    reasoning: list[str] = []
    usage: dict[str, Any] = {}
    for event in _events(url, {"model": "default", "stream_options": {"include_usage": True}, **body}):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice.get("delta", choice)
            pieces = delta.get("content") or delta.get("text") or "", delta.get("reasoning_content") or ""
            if any(pieces):
                clock.tick()
            text.append(pieces[0])
            reasoning.append(pieces[1])
    details = usage.get("prompt_tokens_details") or {}
    return clock.streamed(
        "".join(text),
        "".join(reasoning),
        usage["prompt_tokens"],
        details.get("cached_tokens", 0),
        usage["completion_tokens"],
    )


class _Clock:
    """Times of a stream's pieces."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first: float | None = None
        self.last = self.began

    def tick(self) -> None:
        self.last = time.perf_counter()
        if self.first is None:
            self.first = self.last

    def streamed(self, text: str, reasoning: str, prompt: int, cached: int, new: int) -> Streamed:
        first = self.last if self.first is None else self.first
        return Streamed(
            text=text,
            reasoning=reasoning,
            prompt_tokens=prompt,
            cached_tokens=cached,
            new_tokens=new,
            ttft_s=first - self.began,
            tpot_s=(self.last - first) / (new - 1) if new > 1 else 0.0,
        )


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event. Raises RequestFailed, also for an error within the stream."""
    with _request(url, {**body, "stream": True}) as response:
        for line in response.iter_lines():
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RequestFailed(f"{url}: {event['error']}")
            yield event


def _request(url: str, body: dict[str, Any]) -> requests.Response:
    try:
        response = requests.post(url, json=body, stream=bool(body.get("stream")), timeout=TIMEOUT_S)
    except requests.RequestException as error:
        raise RequestFailed(f"{url} did not answer: {error}") from error
    if response.status_code != 200:
        raise RequestFailed(f"{url} answered {response.status_code}: {response.text}")
    return response
