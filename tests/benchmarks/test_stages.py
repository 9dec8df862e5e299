"""The pieces of the ablation: each can be turned off, and only what it names."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.ablation import Report, Run, markdown
from benchmarks.machine import describe
from benchmarks.stages import features, snapshot_operators
from benchmarks.stages.models import TINY, TINY_DRAFT, unpacked
from benchmarks.stages.server import VARIABLE, _resolve_with, turned_on
from sglang_k3.kernels import registry
from sglang_k3.kernels.registry import Call
from sglang_k3.models.reference import ReferenceModel
from sglang_k3.speculative import record_forms, row_planner, simulated_acceptance
from sglang_k3.testing import streams
from sglang_k3.testing.bench_serving import Figures
from sglang_k3.testing.server_process import ServerProcess

CALL = Call("cpu", torch.float32)


def test_stages_add_one_piece_at_a_time() -> None:
    stages = [stage.on for stage in features.cumulative()]
    assert stages[0] == frozenset() and stages[-1] == frozenset(features.NAMES)
    assert all(len(after - before) == 1 for before, after in pairwise(stages))


def test_what_is_left_out_takes_with_it_what_needs_it() -> None:
    off = {s.label: frozenset(features.NAMES) - s.on for s in features.leave_one_out()}
    assert all("our model class" not in names for names in off.values())
    assert off["all but prefix cache"] == {"prefix cache"}
    assert off["all but folded records"] == {"folded records"}
    assert off["all but replay records"] == {"replay records", "folded records", "verify budget"}
    assert off["all but DSpark speculation"] == off["all but replay records"] | {"DSpark speculation"}
    known = set(features.NAMES)
    assert all(set(feature.needs) < known for feature in features.FEATURES)


def test_the_servers_variables_are_those_that_it_reads() -> None:
    stages = {stage.label: stage for stage in (*features.cumulative(), *features.pinned())}
    assert features.server_env(stages["+ replay records"]) == {record_forms.VARIABLE: "plain"}
    assert features.server_env(stages["+ folded records"]) == {}
    assert record_forms.DEFAULT == "folded"
    assert features.server_env(stages["+ verify budget"]) == {row_planner.VARIABLE: "compact"}
    assert features.server_env(stages["+ folded records, 4 accepted"]) == {
        simulated_acceptance.VARIABLE: "4",
        simulated_acceptance.TOKEN_MODE: simulated_acceptance.REAL,
    }
    stored = [stage.label for stage in stages.values() if features.stores_snapshots(stage.on)]
    assert stored == ["+ DSpark speculation", "+ DSpark speculation, 4 accepted"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_snapshots_leave_the_states_that_records_leave(dtype: torch.dtype) -> None:
    """A verify of three rows, and its commit with a checkpoint, a request without a slot, one that accepts
    nothing."""
    layers, slots, heads, width, rows = 2, 8, 3, 16, 3
    made = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    first = normal(layers, slots, heads, width, width)
    tokens = 4 * rows
    q, k, v = (normal(tokens, heads, width).to(dtype) for _ in range(3))
    g, beta = -normal(tokens, heads, width).abs(), normal(tokens, heads).sigmoid()
    at = torch.tensor([5, -1, 2, 3])
    none, zero = torch.full((4,), -1), torch.zeros(4, dtype=torch.int64)
    counts, offsets, tracks = (torch.tensor(x) for x in ([3, 2, 0, 2], [1, -1, -1, 3], [6, -1, -1, 7]))
    found = []
    for verify, commit in (
        (registry.choose("kda.verify", CALL), registry.choose("kda.commit", CALL)),
        (snapshot_operators.verify, snapshot_operators.commit),
    ):
        states = first.clone()
        bank_u, bank_g = (torch.zeros(layers, 4, rows, heads, width) for _ in range(2))
        bank_k = torch.zeros(layers, 4, rows, heads, width, dtype=dtype)
        spans = at, torch.arange(5) * rows, torch.arange(4)
        outs = [
            verify(
                q, k, v, g, beta, states[i], *spans, bank_u[i], bank_k[i], bank_g[i], zero, zero, none, 0.25
            )
            for i in range(layers)
        ]
        commit(states, at, at, torch.arange(4), bank_u, bank_k, bank_g, zero, counts, offsets, tracks)
        found.append((torch.stack(outs), states))
    (records_o, records_s), (stored_o, stored_s) = found
    live = torch.arange(tokens) // rows != 1
    torch.testing.assert_close(stored_o[:, live], records_o[:, live], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stored_s, records_s, rtol=1e-5, atol=1e-5)
    assert not torch.equal(stored_s[:, 6], first[:, 6]), "the checkpoint was written"
    assert torch.equal(stored_s[:, 2], first[:, 2]) and torch.equal(stored_s[:, 7], first[:, 7])


def test_pieces_that_are_off_run_on_the_reference_and_others_do_not() -> None:
    on = frozenset(features.NAMES) - {"grouped experts"}
    resolve = _resolve_with(features.plain_operators(on))
    names = {
        operator: resolve(operator, CALL)[0].name
        for operator in ("moe.route", "moe.experts", "kda.decode", "rms_norm", "linear")
    }
    assert names == {
        "moe.route": "reference",
        "moe.experts": "reference",
        "kda.decode": "numba",
        "rms_norm": "numba_rows",
        "linear": "few_rows_or_fp32",
    }


def test_whoever_chooses_an_operator_gets_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """`choose` and `resolve` are two doors to one room."""
    monkeypatch.setattr(registry, "resolve", _resolve_with(("mla",), {"kda.commit": len}))
    reference = next(i for i in registry.implementations("mla.paged_attention") if i.name == "reference")
    assert registry.choose("mla.paged_attention", CALL) is reference.function
    assert registry.choose("kda.commit", CALL) is len


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
    without = [*features.cumulative(False), *features.leave_one_out(False), *features.pinned(False)]
    speculating = {feature.name for feature in features.FEATURES if feature.draft}
    assert not any(speculating & stage.on for stage in without)
    assert len(features.leave_one_out(False)) == len(features.leave_one_out()) - len(speculating)


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
    assert "From first to the last without speculation: 2.10 times (1.95 to 2.20)." in text


@pytest.mark.verify
@pytest.mark.parametrize("stage", features.cumulative(), ids=lambda stage: stage.label)
def test_every_stage_serves_the_same_text(stage: features.Stage, tmp_path: Path) -> None:
    on = stage.on
    checkpoint = TINY if features.is_on(on, "packed") else unpacked(TINY, tmp_path / "dense")
    flags = ("--model-path", str(checkpoint), "--device", "cpu", "--dtype", "float32")
    flags += ("--max-total-tokens", "4096", "--max-mamba-cache-size", "16")
    flags += tuple(features.server_flags(on, TINY_DRAFT))
    with ServerProcess(
        *flags,
        log=tmp_path / "log",
        env={VARIABLE: ",".join(sorted(on)), **features.server_env(stage)},
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
