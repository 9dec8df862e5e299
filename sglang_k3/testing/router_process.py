"""smg, SGLang's router, on a free port, for tests."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from sglang_k3.prefix_cache.router_target import RouterWorkers
from sglang_k3.testing.server_process import StartFailed, free_port

START_LIMIT_S = 60


class RouterProcess:
    """In front of workers that are up, by its policy of consistent hashing; it looks at their health once a
    second. Leaving the context ends it."""

    def __init__(self, workers: Sequence[str], log: Path) -> None:
        port = free_port()
        self.url, self._workers, self._log = f"http://127.0.0.1:{port}", workers, log
        command = [sys.executable, "-m", "smg.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker-urls", *workers, "--policy", "consistent_hashing"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        command += ["--health-check-interval-secs", "1", "--health-check-timeout-secs", "5"]
        command += ["--health-failure-threshold", "1", "--health-success-threshold", "1"]
        with log.open("w") as sink:
            self.process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)

    def healthy(self) -> int:
        """How many workers it would send a request to; 0 while it does not answer."""
        workers = RouterWorkers(self.url)
        workers.refresh()
        return len(workers.healthy or ())

    def wait(self) -> Self:
        """Until it knows every worker. Raises StartFailed."""
        ends = time.monotonic() + START_LIMIT_S
        while self.healthy() < len(self._workers):
            if self.process.poll() is not None or time.monotonic() > ends:
                raise StartFailed(
                    f"{self._log.read_text(errors='replace')[-3000:]}\nthe router did not start"
                )
            time.sleep(0.2)
        return self

    def __enter__(self) -> Self:
        return self.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
