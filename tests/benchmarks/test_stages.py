"""The pieces of the ablation: each can be turned off, and only what it names."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.ablation import Report, Run, markdown
from benchmarks.machine import describe
from benchmarks.stages import features
from benchmarks.stages.models import TINY, TINY_DRAFT, unpacked
from benchmarks.stages.server import VARIABLE, _choose_with, turned_on
from sglang_k3.kernels import registry
from sglang_k3.kernels.registry import Call
from sglang_k3.models.reference import ReferenceModel
from sglang_k3.testing import streams
from sglang_k3.testing.bench_serving import Figures
from sglang_k3.testing.server_process import ServerProcess

CALL = Call("cpu", torch.float32)


def test_stages_add_one_piece_at_a_time() -> None:
    stages = [on for _, on in features.cumulative()]
    assert stages[0] == frozenset() and stages[-1] == frozenset(features.NAMES)
    assert all(len(after - before) == 1 for before, after in pairwise(stages))
    for _, on in features.leave_one_out():
        assert len(on) == len(features.NAMES) - 1 and "our model class" in on


def test_pieces_that_are_off_run_on_the_reference_and_others_do_not() -> None:
    on = frozenset(features.NAMES) - {"grouped experts"}
    choose = _choose_with(features.plain_operators(on))
    names = {
        operator: next(
            i.name for i in registry.implementations(operator) if i.function is choose(operator, CALL)
        )
        for operator in ("moe.route", "moe.experts", "kda.decode", "rms_norm", "linear")
    }
    assert names == {
        "moe.route": "reference",
        "moe.experts": "reference",
        "kda.decode": "numba",
        "rms_norm": "numba_rows",
        "linear": "few_rows_or_fp32",
    }


def test_every_operator_of_a_piece_exists() -> None:
    known = {operator.split(".")[0] for operator in registry.operators()}
    assert {operator for f in features.FEATURES for operator in f.operators} <= known


def test_server_flags_turn_off_what_is_off() -> None:
    assert features.server_flags(frozenset(features.NAMES)) == []
    assert features.server_flags(frozenset()) == ["--disable-radix-cache", "--disable-overlap-schedule"]


def test_a_draft_is_given_with_its_feature_and_is_no_stage_without_one() -> None:
    everything = frozenset(features.NAMES)
    assert str(TINY_DRAFT) in features.server_flags(everything, TINY_DRAFT)
    assert features.server_flags(everything - {"DSpark speculation"}, TINY_DRAFT) == []
    assert all("DSpark speculation" not in on for _, on in features.cumulative(has_draft=False))
    assert len(features.leave_one_out(has_draft=False)) == len(features.leave_one_out()) - 1


def test_an_unknown_piece_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "compiled KDA,warp drive")
    with pytest.raises(ValueError, match="warp drive"):
        turned_on()


def test_the_dense_copy_holds_the_same_values(tmp_path: Path) -> None:
    dense = unpacked(TINY, tmp_path / "dense")
    tokens = list(range(40, 90))
    packed_logits, dense_logits = (
        ReferenceModel.from_checkpoint(path, torch.float32).forward(tokens) for path in (TINY, dense)
    )
    assert packed_logits.std() > 0.5
    assert torch.equal(packed_logits, dense_logits)


def figures(seconds: float) -> Figures:
    return Figures("w", 1, 4, 100, 10, 0, seconds, 110 / seconds, 10 / seconds, 5.0, 9.0, 2.0, 3.0)


def test_a_gain_is_only_claimed_where_every_repeat_shows_it() -> None:
    stages = ["first", "+ a", "+ b", "+ DSpark speculation"]
    times = {"first": (8.0, 8.4, 8.8), "+ a": (4.0, 4.0, 4.0), "+ b": (4.1, 3.9, 4.0)}
    times["+ DSpark speculation"] = (2.0, 2.0, 2.0)
    runs = [Run(s, repeat, 2**20, [figures(times[s][repeat])]) for repeat in range(3) for s in stages]
    text = markdown(Report(describe(), "m", "regime", [], 3, stages, [], runs))
    assert "| + a | 4.00 | 2.10 times (2.00 to 2.20) |" in text
    assert "| + b | 4.00 | none (0.98 to 1.03) |" in text
    assert "From first to last: 4.20 times (4.00 to 4.40)." in text
    assert "From first to the last but speculation: 2.10 times (1.95 to 2.20)." in text


@pytest.mark.verify
@pytest.mark.parametrize("label", [label for label, _ in features.cumulative()])
def test_every_stage_serves_the_same_text(label: str, tmp_path: Path) -> None:
    on = dict(features.cumulative())[label]
    checkpoint = TINY if features.is_on(on, "packed") else unpacked(TINY, tmp_path / "dense")
    flags = ("--model-path", str(checkpoint), "--device", "cpu", "--dtype", "float32")
    flags += ("--max-total-tokens", "4096", "--max-mamba-cache-size", "16")
    flags += tuple(features.server_flags(on, TINY_DRAFT))
    with ServerProcess(
        *flags,
        log=tmp_path / "log",
        env={VARIABLE: ",".join(sorted(on))},
        module="benchmarks.stages.server",
    ) as server:
        answer = streams.generate(server.url, "def close(self):\n", {"temperature": 0, "max_new_tokens": 12})
    oracle = ReferenceModel.from_checkpoint(TINY, torch.float32)
    from sglang_k3.training import tokenizer as bpe

    tokenizer = bpe.load(TINY)
    ids = tokenizer.encode("def close(self):\n").ids
    state = oracle.new_state()
    logits = oracle.forward(ids, state)[-1]
    written = []
    for _ in range(answer.new_tokens):
        written.append(int(logits.argmax()))
        logits = oracle.step(written[-1], state)
    assert answer.new_tokens > 2
    assert answer.text == tokenizer.decode(written)
