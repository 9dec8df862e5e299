"""A draft that does not fit ends the server at start, with both sides named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_k3.testing.random_draft import draft_config, draft_tensors, write_draft
from sglang_k3.testing.server_process import draft_flags
from tests.server.conftest import TINY
from tests.server.harness import Server


def tensors_with(fault: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = "layers.1.self_attn.k_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "misshapen":
        tensors[name] = tensors[name][:-1].contiguous()
    else:
        tensors["layers.7.surprise.weight"] = torch.zeros(3, dtype=torch.bfloat16)
    return tensors


# `inside/cases_draft.py` has the same without a server.
@pytest.mark.verify
@pytest.mark.parametrize("fault", ["missing", "misshapen", "unknown"])
def test_a_draft_checkpoint_that_does_not_fit_names_the_tensor(fault: str, tmp_path: Path) -> None:
    config = draft_config(
        hidden_size=192, vocab_size=2048, target_layers=5, taps=[1], mask_token=9, max_positions=16384
    )
    draft = write_draft(tmp_path / "draft", config, tensors_with(fault, draft_tensors(config)))
    server = Server(
        *(TINY, tmp_path / "log", "--dtype", "float32", "--max-total-tokens", "4096"),
        *("--max-running-requests", "2", "--max-mamba-cache-size", "16"),
        *draft_flags(draft),
    )
    assert server.exit_code() != 0
    log = server.log.read_text()
    assert "ConfigError" in log
    assert ("surprise" if fault == "unknown" else "k_proj") in log


@pytest.mark.verify
def test_a_pool_without_room_for_one_request_is_refused_with_the_numbers(tmp_path: Path) -> None:
    """Each request of the buffered strategy takes five slots; four are one too few."""
    config = draft_config(
        hidden_size=192, vocab_size=2048, target_layers=5, taps=[1], mask_token=9, max_positions=16384
    )
    draft = write_draft(tmp_path / "draft", config, draft_tensors(config))
    flags = (
        "--dtype",
        "float32",
        "--page-size",
        "16",
        "--max-total-tokens",
        "4096",
        "--max-running-requests",
        "4",
    )
    flags += draft_flags(draft)
    server = Server(TINY, tmp_path / "few", *flags, "--max-mamba-cache-size", "4")
    assert server.exit_code() != 0
    log = server.log.read_text()
    assert "max_mamba_cache_size=4" in log and "mamba_ratio=5" in log
    with Server(TINY, tmp_path / "enough", *flags, "--max-mamba-cache-size", "5") as enough:
        assert len(enough.generate([5, 6, 7], 8).ids) == 8
