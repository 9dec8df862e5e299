"""How a request is sent through smg, SGLang's router, to a worker that was chosen. Needs requests.

smg's `consistent_hashing` policy sends a request where its header X-SMG-Target-Worker says: the worker's
place, from 0 on, among those that the router calls healthy, in the order of its own GET /workers. That order
is not the command line's, and a worker that fails moves those behind it up: so it is read again and again.
(Tried on smg 1.13.0. sglang-router 0.3.2, which it came from, passes the header over.)
"""

from __future__ import annotations

import requests

HEADER = "X-SMG-Target-Worker"


class RouterWorkers:
    """router: URL of the router. healthy: its healthy workers' URLs in its order, as last read; None before,
    and where the router did not answer."""

    def __init__(self, router: str, timeout_s: float = 2.0) -> None:
        self._url, self._timeout = f"{router.rstrip('/')}/workers", timeout_s
        self.healthy: list[str] | None = None

    def refresh(self) -> None:
        try:
            answer = requests.get(self._url, timeout=self._timeout)
            answer.raise_for_status()
            self.healthy = [worker["url"] for worker in answer.json()["workers"] if worker["is_healthy"]]
        except (requests.RequestException, KeyError, TypeError):
            self.healthy = None

    def headers(self, worker: str) -> dict[str, str]:
        """What steers a request to that URL; nothing where the router has no such healthy worker: it chooses
        then."""
        healthy = self.healthy
        if healthy is None or worker not in healthy:
            return {}
        return {HEADER: str(healthy.index(worker))}
