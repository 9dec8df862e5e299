"""What can't be planned is refused with its value and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_k3.planning.errors import PlanError
from sglang_k3.planning.report import refusals
from tests.planning.plans import planned

SPECULATING = {"draft": "kimi-k3"}


@pytest.mark.parametrize(
    "options, said",
    [
        ({"device": "910b"}, "unknown device '910b': pass one of a3, 950pr, 950dt, cpu, custom"),
        ({"device": "custom"}, "lacks figures: add --memory-gib, --bandwidth, --tflops, --link"),
        ({"bandwidth": -1.0}, "bandwidth -1e+09 must be greater than 0"),
        ({"device": "a3", "memory_gib": 3.0}, "--memory-gib 3 is no more than the 3 GiB that its runtime"),
        ({"host_gib": float("nan")}, "--host-gib nan is not a number"),
        ({"tp": 0}, "--tp 0 must be at least 1"),
        ({"tp": 5}, "--tp 5: 5 ranks can't share 96 KDA heads: a divisor is wanted, one of 1, 2, 3"),
        ({"tp": 8, "dp": 3}, "--dp 3 does not divide --tp 8: pass one of 1, 2, 4, 8"),
        ({"tp": 8, "ep": 16}, "--ep 16 does not divide --tp 8"),
        ({"tp": 6, "ep": 3}, "--ep: 3 ranks can't share 896 experts"),
        ({"tp": 32, **SPECULATING}, "32 ranks can't share 16 key/value heads of the draft"),
        ({"context": 2_000_000}, "--context 2000000 is longer than the model's 1048576 positions: pass 1048"),
        ({"context": 0}, "--context 0 must be at least 1"),
        ({"concurrency": 0}, "--concurrency 0 must be at least 1"),
        ({"records": "plain"}, "--records plain is of a server that speculates: add --draft"),
        ({"records": "never", **SPECULATING}, "unknown --records never: pass one of plain, folded, ring"),
        ({"accept_length": 9.0, **SPECULATING}, "--accept-length 9: a step of 8 rows yields between 1 and 8"),
        ({"cache_strategy": "some"}, "unknown --cache-strategy some: pass one of off, no_buffer"),
        (
            {"cache_strategy": "extra_buffer", "records": "anchored", **SPECULATING},
            "comes with SGLang's lazy strategy, not --cache-strategy extra_buffer: pass extra_buffer_lazy",
        ),
        ({"cache_strategy": "no_buffer", "page_size": 16}, "not --page-size 16: pass --page-size 1"),
        ({"cache_strategy": "off", "checkpoints": 3}, "off keeps nothing for later: leave out --checkpoints"),
        ({"dtype": "float16"}, "unknown --dtype float16: pass one of bfloat16, float32"),
        ({"state_dtype": "fp8"}, "unknown --state-dtype fp8"),
        ({"model_path": Path("/nowhere")}, "No such file or directory: pass a folder with a config.json"),
        ({"draft": "/nowhere"}, "No such file or directory: pass a folder with a config.json"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_named_with_the_remedy(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as raised:
        planned(**options)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "content, said",
    [("{", "is not JSON"), ("[]", "is not a JSON object"), ("{}", "mla_use_nope=None")],
)
def test_a_config_that_cannot_be_read(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(PlanError) as raised:
        planned(model_path=tmp_path)
    assert said in str(raised.value)


def test_a_draft_of_another_target(tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples"
    values = json.loads((examples / "tiny-k3-dspark" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(PlanError, match="expects a target with hidden_size 192, this one has 7168"):
        planned(draft=str(tmp_path))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"tp": 16, "dp": 2}, "attention data parallelism"),
        ({"host_gib": 1.0}, "host tier"),
        ({"kv_dtype": "fp8"}, "the model's dtype"),
        ({"device": "a3"}, "MXFP4 experts are refused on an A3"),
        ({"records": "anchored", **SPECULATING}, "anchored is refused on an NPU"),
        ({"state_dtype": "bfloat16"}, "states in bfloat16 are refused on an NPU"),
        ({}, "nothing here has run on a real NPU"),
    ],
)
def test_what_this_release_refuses_is_said_beside_the_plan(options: dict[str, Any], said: str) -> None:
    assert any(said in line for line in refusals(planned(**options, concurrency=1)))


def test_a_plan_for_a_cpu_has_nothing_refused() -> None:
    assert refusals(planned("cpu", 1)) == []
