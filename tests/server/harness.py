"""Starts real servers for tests and talks to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from sglang_k3.testing.server_process import START_LIMIT_S, ServerProcess


@dataclass(frozen=True)
class Reply:
    """One completion of /generate: output ids, their logprobs, the prompt's logprobs, cached tokens."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[float, int], ...], ...]
    prompt_logprobs: tuple[float, ...]
    cached: int
    finish: str


def told(answer: dict[str, Any]) -> tuple:
    """What two servers have to agree on: ids, logprobs, the runners-up, the reason of the end."""
    meta = answer["meta_info"]
    return (
        answer["output_ids"],
        [entry[0] for entry in meta["output_token_logprobs"]],
        [[(value, token) for value, token, _ in place] for place in meta["output_top_logprobs"]],
        meta["finish_reason"],
    )


def play_sessions(fresh: list[int], answer: Callable[[list[int]], Iterable[int]]) -> None:
    """Eight sessions of six turns, in turn: each sends its history with something of `fresh` added, in the
    fourth turn with an edit in the middle too. answer: of a prompt; the new tokens."""
    histories: list[list[int]] = [[] for _ in range(8)]
    for turn in range(6):
        for session, history in enumerate(histories):
            start = 97 * session + 11 * turn
            if turn == 3:
                history[len(history) // 2] = 77 + session
            ids = [*history, *fresh[start : start + 23 + 2 * session]]
            histories[session] = [*ids, *answer(ids)]


class Server(ServerProcess):
    """The server that tests talk to; ended hard, since nothing of it is needed any more."""

    def __init__(self, model: Path, log: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        super().__init__("--model-path", str(model), "--device", "cpu", *flags, log=log, env=env)
        self.headers: dict[str, str] = {}

    def close(self) -> None:
        self.kill()

    def exit_code(self, limit_s: float = START_LIMIT_S) -> int:
        """Waits for a server that is expected to end by itself."""
        try:
            return self.process.wait(limit_s)
        finally:
            self.close()

    def post(self, path: str, body: dict[str, Any], timeout: float = 600) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=timeout, headers=self.headers)

    def generate(self, ids: list[int], tokens: int, top: int = 0, prompt_logprobs: bool = False) -> Reply:
        """Greedy completion that ignores end-of-sequence."""
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": top,
            "logprob_start_len": 0 if prompt_logprobs else -1,
        }
        response = self.post("/generate", body)
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.text}\n{self.tail()}")
        answer = response.json()
        meta = answer["meta_info"]
        return Reply(
            ids=tuple(answer["output_ids"]),
            logprobs=tuple(entry[0] for entry in meta["output_token_logprobs"]),
            top=tuple(
                tuple((logprob, token) for logprob, token, _ in position)
                for position in meta.get("output_top_logprobs") or ()
            ),
            # The first token of a prompt has no logprob.
            prompt_logprobs=tuple(entry[0] for entry in meta["input_token_logprobs"][1:]),
            cached=meta["cached_tokens"],
            finish=meta["finish_reason"]["type"],
        )

    def generate_all(
        self, prompts: list[list[int]], tokens: int, at_once: int, **options: Any
    ) -> list[Reply]:
        """Every prompt, `at_once` in flight, in the order given."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, tokens, **options), prompts))

    def answer(self, ids: list[int], tokens: int, **sampling: Any) -> dict[str, Any]:
        """What /generate answers, whole, with two runners-up a token; greedy unless `sampling` says else."""
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        response = self.post("/generate", body)
        assert response.status_code == 200, response.text + self.tail()
        return response.json()

    def flush(self) -> None:
        """Empties the prefix cache; waits while requests are still being retired."""
        for _ in range(100):
            if self.post("/flush_cache", {}).status_code == 200:
                return
            time.sleep(0.1)
        raise RuntimeError("the cache could not be flushed\n" + self.tail())
