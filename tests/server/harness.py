"""Starts real servers for tests and talks to them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

START_LIMIT_S = 240


class StartFailed(RuntimeError):
    """The server process ended, or never became healthy; the message holds the end of its log."""


@dataclass(frozen=True)
class Reply:
    """One completion of /generate: output ids, their logprobs, the prompt's logprobs, cached tokens."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[float, int], ...], ...]
    prompt_logprobs: tuple[float, ...]
    cached: int
    finish: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`python -m sglang.launch_server` on a free port, ended with its whole process group."""

    def __init__(self, model: Path, log: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu", *flags]
        with log.open("w") as sink:
            self.process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def wait(self) -> Server:
        """Until /health_generate answers. Raises StartFailed."""
        limit = time.monotonic() + START_LIMIT_S
        while time.monotonic() < limit:
            if self.process.poll() is not None:
                raise StartFailed(f"exit code {self.process.returncode}\n{self.tail()}")
            try:
                if requests.get(f"{self.url}/health_generate", timeout=30).status_code == 200:
                    return self
            except requests.RequestException:
                pass
            time.sleep(0.5)
        self.close()
        raise StartFailed(f"not healthy after {START_LIMIT_S} s\n{self.tail()}")

    def exit_code(self, limit_s: float = START_LIMIT_S) -> int:
        """Waits for a server that is expected to end by itself."""
        try:
            return self.process.wait(limit_s)
        finally:
            self.close()

    def tail(self, characters: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-characters:]

    def close(self) -> None:
        """Ends every process of the server's session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Server:
        try:
            return self.wait()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc: object) -> None:
        self.close()

    def post(self, path: str, body: dict[str, Any], timeout: float = 600) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=timeout)

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

    def flush(self) -> None:
        """Empties the prefix cache; waits while requests are still being retired."""
        for _ in range(100):
            if self.post("/flush_cache", {}).status_code == 200:
                return
            time.sleep(0.1)
        raise RuntimeError("the cache could not be flushed\n" + self.tail())
