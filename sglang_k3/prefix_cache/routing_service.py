"""A small HTTP service around `routing.Chooser`.

    python -m sglang_k3.prefix_cache.routing_service --page-size 16 --port 8800 \\
        --worker a=tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 \\
        --worker b=tcp://127.0.0.1:6557,tcp://127.0.0.1:6558

POST /choose {"input_ids": [...]} answers {"worker", "hit", "by_load", "headers"} and counts a request under
way there until POST /ended {"worker": ...}. GET /counts answers how choices were made. With --router, the
URL of an smg, workers go by their URLs and a request with these headers reaches the chosen one through it.
"""

from __future__ import annotations

import argparse
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from sglang_k3.prefix_cache.events_subscriber import Subscriber
from sglang_k3.prefix_cache.router_target import RouterWorkers
from sglang_k3.prefix_cache.routing import Chooser

_ROUTER_READ_S = 0.5
"""Between two looks at the router's list of workers."""


class Prompt(msgspec.Struct):
    input_ids: list[int]


class Ended(msgspec.Struct):
    worker: str


class Service(ThreadingHTTPServer):
    """Listens on loopback; a thread follows the workers' events, another one the router's list of workers.
    port: 0 takes a free one. router: whose headers are told; without one there are none."""

    daemon_threads = True

    def __init__(
        self, chooser: Chooser, port: int, host: str = "127.0.0.1", router: RouterWorkers | None = None
    ) -> None:
        super().__init__((host, port), _Handler)
        self.chooser, self.lock, self.router = chooser, threading.Lock(), router
        self._stopped = threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()
        if router is not None:
            threading.Thread(target=self._follow_router, args=(router,), daemon=True).start()

    def _follow(self) -> None:
        while not self._stopped.wait(0.02):
            with self.lock:
                self.chooser.refresh()

    def _follow_router(self, router: RouterWorkers) -> None:
        while True:
            router.refresh()
            if self._stopped.wait(_ROUTER_READ_S):
                return

    def shutdown(self) -> None:
        self._stopped.set()
        super().shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        if self.path != "/counts":
            return self._answer(404, {"error": f"{self.path} is not here: GET /counts"})
        with self.server.lock:
            self._answer(200, vars(self.server.chooser.counts))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chooser = self.server.chooser
        try:
            if self.path == "/choose":
                prompt = msgspec.json.decode(body, type=Prompt)
                with self.server.lock:
                    choice = chooser.choose(prompt.input_ids)
                    chooser.started(choice.worker)
                router = self.server.router
                headers = {} if router is None else router.headers(choice.worker)
                self._answer(200, {**vars(choice), "headers": headers})
            elif self.path == "/ended":
                worker = msgspec.json.decode(body, type=Ended).worker
                with self.server.lock:
                    if not chooser.load.get(worker):
                        return self._answer(400, {"error": f"no request is under way at {worker!r}"})
                    chooser.ended(worker)
                self._answer(200, {})
            else:
                self._answer(404, {"error": f"{self.path} is not here: POST /choose or /ended"})
        except (msgspec.DecodeError, OverflowError) as error:
            self._answer(400, {"error": str(error)})

    def _answer(self, status: int, body: object) -> None:
        payload = msgspec.json.encode(body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        """A line a request is the router's to write."""


def _worker(text: str) -> tuple[str, tuple[str, str]]:
    name, _, sockets = text.partition("=")
    endpoint, _, replay = sockets.partition(",")
    if not (name and endpoint and replay):
        raise argparse.ArgumentTypeError(
            f"{text!r}: pass NAME=EVENTS,REPLAY, as a=tcp://host:5557,tcp://host:5558"
        )
    return name, (endpoint, replay)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--worker", type=_worker, action="append", required=True, metavar="NAME=EVENTS,REPLAY"
    )
    parser.add_argument("--page-size", type=int, required=True, help="the workers' --page-size")
    parser.add_argument("--load-tokens", type=int, default=512, help="what one request under way weighs")
    parser.add_argument(
        "--kv-share", type=float, default=0.2, help="what KV without a state weighs, by what is restored"
    )
    parser.add_argument(
        "--router", metavar="URL", help="an smg (--policy consistent_hashing) whose headers /choose tells"
    )
    parser.add_argument("--stale-seconds", type=float, default=10.0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8800)
    arguments = parser.parse_args()
    workers = {name: Subscriber(*sockets) for name, sockets in arguments.worker}
    chooser = Chooser(
        workers,
        arguments.page_size,
        load_tokens=arguments.load_tokens,
        kv_share=arguments.kv_share,
        stale_s=arguments.stale_seconds,
    )
    router = RouterWorkers(arguments.router) if arguments.router else None
    Service(chooser, arguments.port, arguments.host, router).serve_forever()


if __name__ == "__main__":
    main()
