"""Starts a server, completes a prompt over both HTTP interfaces, prints text and timings, stops the server.

    python -m sglang_k3.testing.demo --model-path CHECKPOINT [any flag of sglang.launch_server]

Exit code 0 when every request was answered, else 1 with the end of the server's log.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

START_LIMIT_S = 300
NEW_TOKENS = 48
PROMPT = "Kimi Delta Attention keeps one matrix for each head and forgets along its key axis. " * 6


class DemoFailed(RuntimeError):
    """The server ended or did not answer; the message says which."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _server(flags: list[str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m sglang.launch_server` in a session of its own; leaving ends every process of it."""
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        *flags,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            # Children may outlive the parent's orderly end.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, console: Console) -> float:
    """Seconds until /health answers, with a status line that counts them. Raises DemoFailed."""
    began = time.monotonic()
    with console.status("Starting the server ...") as status:
        while (elapsed := time.monotonic() - began) < START_LIMIT_S:
            if process.poll() is not None:
                raise DemoFailed(f"the server ended with exit code {process.returncode}")
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=10):
                    return elapsed
            except (urllib.error.URLError, OSError):
                status.update(f"Starting the server ... {elapsed:.0f} s")
                time.sleep(0.5)
    raise DemoFailed(f"the server was not ready after {START_LIMIT_S} s")


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise DemoFailed(f"{url} answered {error.code}: {error.read().decode(errors='replace')}") from error
    except (urllib.error.URLError, OSError) as error:
        raise DemoFailed(f"{url} did not answer: {error}") from error


def _complete(url: str, console: Console) -> None:
    """Three requests: /generate cold, the same again (its prefix is cached), and /v1/completions."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    for title in ("/generate", "/generate, same prompt again"):
        began = time.monotonic()
        with console.status(f"{title} ..."):
            answer = _post(f"{url}/generate", {"text": PROMPT, "sampling_params": sampling})
        meta = answer["meta_info"]
        _show(
            console,
            title,
            f"{meta['prompt_tokens']} prompt tokens, {meta['cached_tokens']} of them from the prefix cache; "
            f"{_rate(meta['completion_tokens'], time.monotonic() - began)}",
            answer["text"],
        )
    body = {
        "model": "default",
        "prompt": PROMPT,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    began = time.monotonic()
    with console.status("/v1/completions ..."):
        answer = _post(f"{url}/v1/completions", body)
    rate = _rate(answer["usage"]["completion_tokens"], time.monotonic() - began)
    _show(console, "/v1/completions", rate, answer["choices"][0]["text"])


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens} new tokens in {seconds:.2f} s ({tokens / seconds:.1f} a second)"


def _show(console: Console, title: str, timing: str, text: str) -> None:
    console.print(Text(title, "bold"))
    console.print(Text(f"  {timing}"))
    # A random model writes any byte; repr keeps control characters off the terminal.
    console.print(Text(f"  {text!r}", "cyan"))


def run(flags: list[str], console: Console) -> int:
    """The demo with launch_server's `flags`; returns the exit code."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        try:
            with _server(flags, port, log) as process:
                seconds = _wait(process, f"http://127.0.0.1:{port}", console)
                console.print(f"Server ready after {seconds:.0f} s, weights random: the text means nothing.")
                _complete(f"http://127.0.0.1:{port}", console)
        except DemoFailed as failure:
            console.print(Text(log.read_text(errors="replace")[-4000:], "dim"))
            console.print(Text(f"Demo failed: {failure}", "bold red"))
            return 1
    console.print("Server stopped.")
    return 0


def main() -> None:
    # A SIGTERM must stop the server too: turn it into an exception that unwinds.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(run(sys.argv[1:], Console()))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
