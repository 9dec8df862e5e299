"""What doctor looks at beside the installation: sockets that SGLang's processes talk by, and memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

LEAST_MEMORY_GIB = 4.0
"""What a server of the smallest model takes, most of it SGLang's imports in three processes."""


def sockets() -> Iterator[tuple[str, bool, str]]:
    """A message through each kind of socket that a server opens."""
    yield "loopback", *_through("tcp://127.0.0.1:*")
    with tempfile.TemporaryDirectory() as folder:
        yield "ipc", *_through(f"ipc://{Path(folder) / 'doctor'}")


def _through(address: str) -> tuple[bool, str]:
    import zmq

    kind = address.partition(":")[0]
    context = zmq.Context()
    try:
        sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        sender.linger = receiver.linger = 0
        receiver.bind(address)
        sender.connect(receiver.getsockopt_string(zmq.LAST_ENDPOINT))
        sender.send(b"doctor")
        if not receiver.poll(2000):
            return False, f"a {kind} message did not arrive in 2 s: is a firewall or sandbox in the way?"
        return receiver.recv() == b"doctor", f"a {kind} message arrived"
    except zmq.ZMQError as error:
        return False, f"{kind} sockets cannot be used ({error}): SGLang's processes talk by them"
    finally:
        context.destroy(linger=0)


def memory() -> tuple[bool, str]:
    import psutil

    found = psutil.virtual_memory()
    free, total = found.available / 2**30, found.total / 2**30
    enough = free >= LEAST_MEMORY_GIB
    advice = "" if enough else f"; a server of the smallest model takes {LEAST_MEMORY_GIB:.0f} GiB"
    return enough, f"{free:.1f} of {total:.1f} GiB available{advice}"
