"""A real smg sends a request to the worker that was chosen. The workers say only who they are: real ones
are behind it in tests/server/test_workers.py."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests

from sglang_k3.prefix_cache.router_target import HEADER, RouterWorkers
from sglang_k3.testing.router_process import RouterProcess
from sglang_k3.testing.server_process import free_port


class Bare(ThreadingHTTPServer):
    """A worker as far as a router looks."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Answers)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class _Answers(BaseHTTPRequestHandler):
    server: Bare

    def do_GET(self) -> None:
        payload = json.dumps(
            {"url": self.server.url, "model_path": "bare", "served_model_name": "bare"}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def bare() -> Iterator[list[Bare]]:
    made = [Bare() for _ in range(3)]
    yield made
    for worker in made:
        worker.end()


def reached(router: RouterProcess, headers: dict[str, str]) -> str:
    answer = requests.post(f"{router.url}/generate", json={"text": "x"}, headers=headers, timeout=20)
    answer.raise_for_status()
    assert answer.headers["X-SMG-Routed-Worker-Id"] == answer.json()["url"]
    return answer.json()["url"]


def comes_to(router: RouterProcess, healthy: int) -> bool:
    ends = time.monotonic() + 30
    while router.healthy() != healthy:
        if time.monotonic() > ends:
            return False
        time.sleep(0.1)
    return True


def test_a_request_reaches_the_chosen_worker_also_behind_one_that_failed(
    bare: list[Bare], tmp_path: Path
) -> None:
    with RouterProcess([worker.url for worker in bare], tmp_path / "router.log") as router:
        workers = RouterWorkers(router.url + "/")
        assert workers.headers(bare[0].url) == {}, "its list was not read yet"
        workers.refresh()
        assert workers.healthy is not None and sorted(workers.healthy) == sorted(w.url for w in bare)
        for worker in bare * 2:
            assert reached(router, workers.headers(worker.url)) == worker.url
        # The first of the router's own order fails, and the others move up.
        failing = next(worker for worker in bare if worker.url == workers.healthy[0])
        others = [worker for worker in bare if worker is not failing]
        failing.end()
        assert comes_to(router, 2)
        workers.refresh()
        assert workers.headers(failing.url) == {}
        assert sorted(workers.headers(worker.url)[HEADER] for worker in others) == ["0", "1"]
        for worker in others * 2:
            assert reached(router, workers.headers(worker.url)) == worker.url
        # It comes again.
        bare[bare.index(failing)] = Bare(failing.server_address[1])
        assert comes_to(router, 3)
        workers.refresh()
        for worker in bare:
            assert reached(router, workers.headers(worker.url)) == worker.url


def test_a_router_that_does_not_answer_steers_nothing(bare: list[Bare]) -> None:
    workers = RouterWorkers(f"http://127.0.0.1:{free_port()}")
    workers.refresh()
    assert workers.healthy is None and workers.headers(bare[0].url) == {}
    # Something else listens there.
    workers = RouterWorkers(bare[0].url)
    workers.refresh()
    assert workers.healthy is None and workers.headers(bare[0].url) == {}
