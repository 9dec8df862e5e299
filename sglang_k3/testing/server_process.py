"""`python -m sglang.launch_server` on a free port, for demos, benchmarks and tests."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import requests

START_LIMIT_S = 300
_STOP_LIMIT_S = 20


def draft_flags(draft: Path) -> tuple[str, ...]:
    """launch_server's flags that make it speculate with this DSpark draft."""
    return ("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(draft))


class StartFailed(RuntimeError):
    """The server ended, or never became healthy; the message holds the end of its log."""


def free_port() -> int:
    """A port that nobody listens on, below those that outgoing connections get: a server binds its port half
    a minute behind this call, and connections are made meanwhile, its own among them. Raises OSError."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port


class ServerProcess:
    """A server in a session of its own; leaving the context ends every process of it.

    flags: launch_server's, model and all, without host and port. on_wait: called with the seconds since
    the start, twice a second, until the server is healthy. module: what is run in launch_server's place.
    """

    def __init__(
        self,
        *flags: str,
        log: Path,
        env: Mapping[str, str] | None = None,
        on_wait: Callable[[float], None] = lambda seconds: None,
        module: str = "sglang.launch_server",
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.on_wait = on_wait
        self.start_seconds = 0.0
        # An idle scheduler polls without a pause otherwise, and takes a core from a server beside it.
        command = [sys.executable, "-m", module, *flags, "--sleep-on-idle"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        with log.open("w") as sink:
            self.process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def wait(self) -> Self:
        """Until /health_generate answers. Raises StartFailed."""
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < START_LIMIT_S:
            if self.process.poll() is not None:
                raise StartFailed(
                    f"{self.tail()}\nthe server ended at start, exit code {self.process.returncode}"
                )
            self.on_wait(elapsed)
            try:
                if requests.get(f"{self.url}/health_generate", timeout=30).status_code == 200:
                    self.start_seconds = elapsed
                    return self
            except requests.RequestException:
                pass
            time.sleep(0.5)
        raise StartFailed(f"{self.tail()}\nthe server was not healthy after {START_LIMIT_S} s")

    def tail(self, characters: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-characters:]

    def resident_bytes(self) -> int:
        """Memory of all processes of the server; what several share is counted once in each."""
        server = psutil.Process(self.process.pid)
        return sum(part.memory_info().rss for part in (server, *server.children(recursive=True)))

    def close(self) -> None:
        """Ask the server to end, then end whatever is left of its session."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(_STOP_LIMIT_S)
        self.kill()

    def kill(self) -> None:
        """End every process of the session at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Self:
        try:
            return self.wait()
        except BaseException:
            self.kill()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
