"""The served model against transformers' own Kimi Linear, on one saved checkpoint in its dialect."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_k3.testing.random_checkpoint import make

LENGTHS = (1, 63, 64, 65, 200)


@pytest.mark.parametrize("mode", [(), ("--enable-deterministic-inference",)], ids=["fast", "exact"])
def test_float32_logits_are_within_1e_4(mode: tuple[str, ...], checkpoints: Path, tmp_path: Path) -> None:
    model = make("kimi-linear-transformers", checkpoints / f"transformers{len(mode)}")
    draw = random.Random(2)
    prompts = [[draw.randrange(256) for _ in range(length)] for length in LENGTHS]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    command = [sys.executable, "-m", "tests.server.layer_probe", str(model), str(tmp_path / "prompts.json")]
    command += [str(tmp_path / "out.pt"), "--dtype", "float32", "--disable-radix-cache", *mode]
    command += ["--max-total-tokens", "2048", "--max-mamba-cache-size", "20"]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=600)
    served = torch.load(tmp_path / "out.pt")

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for prompt, result in zip(prompts, served, strict=True):
        with torch.no_grad():
            expected = theirs(torch.tensor([prompt])).logits[0]
        assert expected.std() > 0.5
        torch.testing.assert_close(result["logits"], expected, rtol=0, atol=1e-4)
