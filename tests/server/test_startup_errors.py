"""A server that is not fully plugged in, or whose files do not fit, ends at start and says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sglang_k3.testing.random_checkpoint import make
from tests.server.harness import Server

SABOTAGE = str(Path(__file__).parent / "sabotage")
SMALL = ("--dtype", "float32", "--max-total-tokens", "2048", "--max-mamba-cache-size", "20")


# Each process loads plugins by the same call. A lost hook in the scheduler stays in `make test`; the others
# take half a minute each.
SCHEDULER = pytest.param("scheduler", marks=pytest.mark.verify)
DETOKENIZER = pytest.param("detokenizer", marks=pytest.mark.verify)


def failed_start(model: Path, log: Path, fault: str = "", where: str = "") -> str:
    """The log of a server that must end by itself with a non-zero code."""
    env = {"PYTHONPATH": SABOTAGE, "K3_SABOTAGE": fault, "K3_SABOTAGE_IN": where} if fault else {}
    server = Server(model, log, *SMALL, env=env)
    assert server.exit_code() != 0
    return server.tail(1_000_000)


@pytest.fixture(scope="module")
def tiny(checkpoints: Path) -> Path:
    return make("k3", checkpoints / "tiny_for_errors")


def test_another_sglang_version_is_named_with_the_one_to_install(tiny: Path, tmp_path: Path) -> None:
    log = failed_start(tiny, tmp_path / "log", "other_version", "main")
    assert "SGLang 0.5.22 is installed" in log
    assert "pip install sglang==0.5.23" in log


@pytest.mark.parametrize("where", ["main", SCHEDULER, DETOKENIZER])
def test_a_broken_import_of_ours_ends_the_server(tiny: Path, tmp_path: Path, where: str) -> None:
    log = failed_start(tiny, tmp_path / "log", "broken_import", where)
    assert "planted: sglang_k3.upstream is broken" in log


@pytest.mark.parametrize("where", ["main", SCHEDULER, DETOKENIZER])
def test_a_renamed_hook_target_ends_the_server_and_is_named(tiny: Path, tmp_path: Path, where: str) -> None:
    log = failed_start(tiny, tmp_path / "log", "renamed_target", where)
    assert "SGLang has no sglang.srt.utils.numa_utils.init_threads_binding" in log


@pytest.mark.parametrize("where", ["main", "scheduler"])
def test_a_hook_that_did_not_take_ends_the_server_and_is_named(
    tiny: Path, tmp_path: Path, where: str
) -> None:
    log = failed_start(tiny, tmp_path / "log", "lost_hook", where)
    assert "attn_backend_wrapper did not take" in log


@pytest.mark.parametrize("where", ["main", SCHEDULER])
def test_a_lost_registration_ends_the_server_and_is_named(tiny: Path, tmp_path: Path, where: str) -> None:
    log = failed_start(tiny, tmp_path / "log", "lost_registration", where)
    assert "change 'config classes' is not in force" in log


@pytest.mark.parametrize(
    "fault", ["missing", *(pytest.param(name, marks=pytest.mark.verify) for name in ("unknown", "misshapen"))]
)
def test_a_checkpoint_that_does_not_fit_names_the_tensor(tmp_path: Path, fault: str) -> None:
    model = make("k3", tmp_path / "model")
    [file] = model.glob("*.safetensors")
    tensors = load_file(file)
    name = "language_model.model.layers.3.self_attn.kv_b_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "unknown":
        name = "language_model.model.layers.3.self_attn.surprise.weight"
        tensors[name] = tensors["language_model.model.norm.weight"].clone()
    else:
        tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    log = failed_start(model, tmp_path / "log")
    assert "CheckpointError" in log
    assert name in log
