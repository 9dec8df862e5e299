"""Checkpoints that the server tests share."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_k3.testing.random_checkpoint import make
from sglang_k3.training import tokenizer as bpe
from sglang_k3.training.data import read_corpus

TINY = Path(__file__).parents[2] / "examples" / "tiny-k3"

LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 95, 97, 128, 200, 256, 333, 512, 513, 700, 1000, 1500)


def must_hit(length: int) -> bool:
    """Whether a prompt sent twice has to find a state in the cache, whatever the strategy.

    With buffers one is kept at the last whole page; without them one stands where each chunk ended. A
    prompt's last token is never taken from the cache.
    """
    return length > 128 and length % 64 != 0


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that checkpoints are made in."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def packed_k3(checkpoints: Path) -> Path:
    """K3 in float32 with packed MXFP4 experts, 13 layers of every kind."""
    return make("k3", checkpoints / "packed_k3", dtype="float32", experts="mxfp4")


@pytest.fixture(scope="session")
def bf16_k3(checkpoints: Path) -> Path:
    """The same in bfloat16."""
    return make("k3", checkpoints / "bf16_k3", dtype="bfloat16", experts="mxfp4")


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """20 prompts of 1 to 1,500 tokens; none is another's prefix."""
    draw = random.Random(5)
    return [[draw.randrange(256) for _ in range(length)] for length in LENGTHS]


@dataclass(frozen=True)
class Model:
    """A checkpoint and prompts for it."""

    path: Path
    prompts: list[list[int]]


@pytest.fixture(scope="session")
def trained_k3() -> Model:
    """The trained checkpoint of examples/, with prompts from files that its training did not see."""
    texts = read_corpus().held_out
    ids = [i for name in sorted(texts) for i in bpe.load(TINY).encode(texts[name][:20_000]).ids]
    return Model(TINY, [ids[7 * length : 8 * length] for length in LENGTHS])


@pytest.fixture(scope="package", params=["random", "trained"])
def model(
    request: pytest.FixtureRequest, packed_k3: Path, prompts: list[list[int]], trained_k3: Model
) -> Model:
    """Both kinds of checkpoint: 13 layers of random weights, five trained ones."""
    return trained_k3 if request.param == "trained" else Model(packed_k3, prompts)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A server of the exact mode meets one of the two checkpoints in `make test`, both in `make verify`."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        if parameters is None or "recorded" not in parameters.params:
            continue
        other = "mixed" in parameters.params["recorded"] or "no_buffer" in parameters.params["recorded"]
        if other == (parameters.params["model"] == "trained"):
            item.add_marker(pytest.mark.verify)
