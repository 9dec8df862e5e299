"""Our Triton operators as torch sees them: schema, fake results, graphs, registry, any number of cores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from sglang_k3.kernels import registry, triton_targets
from sglang_k3.kernels.acceptance import ascend_triton as acceptance
from sglang_k3.kernels.acceptance import reference as acceptance_reference
from sglang_k3.kernels.attention_residual import ascend_triton as residual
from sglang_k3.kernels.attention_residual import reference as residual_reference
from sglang_k3.kernels.registry import Call
from tests.kernels.spans import scaled_error
from tests.kernels.triton.recorder import recording

registry.load()
EPS = 1e-5
OURS = [
    *("acceptance.chain", "activation.gated", "activation.gated_int8", "activation.gated_mxfp8"),
    *("attention_residual.block_prepare", "attention_residual.merge_norm"),
    *("attention_residual.merge_partial", "attention_residual.mix", "attention_residual.mix_norm"),
    *("gated_rms_norm", "kda.commit", "kda.decode", "kda.extend", "kda.verify", "mla.paged_attention"),
    *("short_conv.commit", "short_conv.decode", "short_conv.extend", "short_conv.verify"),
]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _arguments() -> dict[str, tuple[Any, ...]]:
    """Of each torch operator, small."""
    two, bounds = torch.tensor([2, 1]), torch.tensor([0, 2, 4])
    none, some = two * 0 - 1, two * 0 + 2
    x, weight, windows = _random(4, 12), _random(12, 4), _random(3, 3, 12)
    q, k, v, g = (_random(4, 2, 32, seed=seed) for seed in range(4))
    step = q, k, v, -g.abs(), _random(4, 2).sigmoid()
    pool = _random(3, 2, 32, 32)
    bank = torch.zeros(2, 2, 2, 32), torch.zeros(2, 2, 2, 32), torch.zeros(2, 2, 2, 32)
    rows = two - 1
    mixed = _random(2, 10), _random(3, 2, 10), _random(10), EPS
    merged = _random(2, 10), _random(2, 10), *torch.ones(2, 2), _random(10), EPS
    states = two, two, rows, *(part[None] for part in bank), two * 0, some, none, none
    return {
        "acceptance_chain": (torch.zeros(3, 4).long(), torch.ones(3, 4).long()),
        "gated": (_random(2, 10), 4.0, 25.0),
        "gated_mxfp8": (_random(2, 128), 4.0, 25.0),
        "gated_int8": (_random(2, 10), 4.0, 25.0),
        "attention_residual_mix": mixed,
        "attention_residual_mix_norm": (*mixed, _random(10), EPS),
        "attention_residual_merge": merged,
        "attention_residual_merge_norm": (*merged, _random(10), EPS),
        "attention_residual_prepare": (_random(3, 6, 10), _random(2, 10), EPS),
        "gated_rms_norm": (_random(2, 2, 5), _random(2, 10), _random(5), EPS),
        "kda_decode": (*(part[:2] for part in step), pool, two, 0.2),
        "kda_verify": (*step, pool, two, bounds, rows, *bank, two * 0, two * 0, none, 0.2, 2),
        "kda_verify_block": (*step, pool, two, bounds, rows, *bank, two * 0, two * 0, none, 0.2, 2),
        "kda_extend": (*step, pool, two, bounds, two > 1, none, none, 0.2),
        "kda_commit": (pool[None], *states, True),
        "mla_paged_attention": (
            _random(4, 2, 48),
            *(_random(192, 32), _random(192, 16)),
            torch.arange(192).view(3, 64).int(),
            *(two, bounds, two * 9),
            *(0.2, 2),
        ),
        "short_conv_decode": (x[:2], weight, windows, two),
        "short_conv_verify": (x, weight, windows, two, bounds, rows, torch.zeros(2, 2, 12)),
        "short_conv_extend": (x, weight, windows, two, bounds, two > 1, none, none),
        "short_conv_commit": (windows[None], two, rows, _random(1, 2, 2, 12), some, None, none, none, False),
    }


@pytest.mark.parametrize("name", _arguments())
def test_an_operator_keeps_to_its_schema_and_its_fake(name: str):
    """What it mutates is declared, and a graph's tracing gets the right shapes without running it."""
    operator = getattr(torch.ops.sglang_k3, name).default
    checks = "test_schema", "test_faketensor"
    assert set(torch.library.opcheck(operator, _arguments()[name], test_utils=checks).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", _arguments())
def test_no_operator_reads_a_value_on_the_host(name: str):
    """Traced with fakes: an item() or a size that depends on data would raise."""
    arguments = _arguments()[name]
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    operator = getattr(torch.ops.sglang_k3, name).default

    def call(*given: torch.Tensor) -> Any:
        parts = iter(given)
        return operator(*(next(parts) if isinstance(x, torch.Tensor) else x for x in arguments))

    with recording() as launches:
        graph = make_fx(call, tracing_mode="fake")(*tensors)
    assert not launches
    assert next(node.target for node in graph.graph.nodes if node.op == "call_function") == operator


def test_the_registry_has_each_below_what_serves():
    call = Call("npu", torch.bfloat16)
    found = {
        operator: entry
        for operator in registry.operators()
        for entry in registry.implementations(operator)
        if entry.name == triton_targets.NAME
    }
    assert sorted(found) == OURS
    for operator, entry in found.items():
        if operator in ("mla.paged_attention", "activation.gated_mxfp8", "kda.extend"):
            continue  # they ask for the page, the chip, the gate: cases_mla.py, _rows.py, _kda_chunk.py
        assert entry.device == "npu" and not entry.exact and entry.refusal(call) is None
        assert "float64" in (entry.refusal(Call("npu", torch.float64)) or "")
        # Vendors' operators, where they are installed, and torch forms.
        assert registry.resolve(operator, call)[0].preference > entry.preference


def test_a_host_without_triton_is_told_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_targets.importlib.util, "find_spec", lambda name: None)
    assert triton_targets.refusal(Call("npu", torch.bfloat16)) == "triton-ascend is not installed"


def _is_float8(x: torch.Tensor | None) -> bool:
    return x is not None and x.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("cores", [2, 3])
def test_results_do_not_depend_on_the_number_of_cores(cores: int, monkeypatch: pytest.MonkeyPatch):
    """Each program then walks over several items."""

    def results() -> list[Any]:
        out = []
        for name, arguments in _arguments().items():
            given = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
            answer = getattr(torch.ops.sglang_k3, name).default(*given)
            answers = answer if isinstance(answer, tuple) else (answer,)
            # Codes are compared as bytes: torch compares no float8.
            out += [x.view(torch.uint8) if _is_float8(x) else x for x in answers]
            out += [x for x in given if isinstance(x, torch.Tensor)]
        return out

    want = results()
    monkeypatch.setattr(triton_targets, "_cores", lambda: cores)
    with recording(cores=cores):
        got = results()
    for ours, theirs in zip(got, want, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


# --- attention residual, acceptance ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("rows", [0, 1, 8])
def test_mix(dtype: torch.dtype, tolerance: float, rows: int):
    partial, bank, key = _random(3, 40).to(dtype), _random(rows, 3, 40, seed=1).to(dtype), _random(40, seed=2)
    with recording():
        got = residual.mix(partial, bank, key, EPS)
    want = residual_reference.mix(partial.double(), bank.double(), key.double(), EPS)
    assert got.dtype == dtype and scaled_error(got, want) < tolerance


def test_mix_of_scores_far_apart():
    """Online or not, the largest score sets the scale: exp of the difference never overflows."""
    partial, bank = _random(2, 40), _random(4, 2, 40, seed=1)
    key = 300 * _random(40, seed=2)
    want = residual_reference.mix(partial.double(), bank.double(), key.double(), EPS)
    assert scaled_error(residual.mix(partial, bank, key, EPS), want) < 1e-4


@pytest.mark.parametrize("rows", [0, 5])
def test_merge_of_a_summary(rows: int):
    partial, bank, keys = _random(3, 40), _random(rows, 3, 40, seed=1), _random(2, 40, seed=2)
    summary = residual_reference.block_prepare(bank, keys, EPS)
    with recording():
        got = residual.merge_partial(partial, *(part[1] for part in summary), keys[1], EPS)
    assert (
        scaled_error(got, residual_reference.mix(partial.double(), bank.double(), keys[1].double(), EPS))
        < 2e-6
    )


@pytest.mark.parametrize("rows, tokens, readers", [(1, 3, 1), (3, 5, 2), (8, 9, 33), (9, 3, 2), (17, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_summary_of_a_bank(dtype: torch.dtype, rows: int, tokens: int, readers: int):
    """Groups of tokens that are not full, or of one; more readers than a tile has; two chunks of columns."""
    whole = _random(rows, tokens + 2, 150).to(dtype)
    bank, keys = whole[:, :tokens], _random(readers, 150, seed=1)
    with recording():
        got = residual.block_prepare(bank, keys, EPS)
    want = residual_reference.block_prepare(bank.double(), keys.double(), EPS)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == torch.float32 and ours.shape == theirs.shape
        assert scaled_error(ours, theirs) < 1e-5


def test_a_summary_of_scores_far_apart():
    """Each token's largest score sets its scale; its neighbours in the tile, whose scores differ, do not."""
    bank, keys = _random(4, 6, 40), 300 * _random(2, 40, seed=2)
    got, want = (form.block_prepare(bank, keys, EPS) for form in (residual, residual_reference))
    assert scaled_error(got.maximum, want.maximum) < 1e-6
    assert scaled_error(got.acc, want.acc) < 1e-3 and scaled_error(got.total, want.total) < 1e-3


def test_an_empty_bank_has_the_oracles_summary():
    got, want = (
        f.block_prepare(_random(0, 3, 40), _random(2, 40), EPS) for f in (residual, residual_reference)
    )
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_a_mix_with_the_next_norm_is_the_two_after_one_another(dtype: torch.dtype, tolerance: float):
    """In bfloat16 the oracle rounds between them, as the checkpoint's layers do."""
    partial, bank, key = _random(3, 40).to(dtype), _random(5, 3, 40, seed=1).to(dtype), _random(40, seed=2)
    norm = (3 * _random(40, seed=3)).to(dtype), EPS
    with recording():
        got = residual.mix_norm(partial, bank, key, EPS, *norm)
    assert got.dtype == dtype
    assert scaled_error(got, residual_reference.mix_norm(partial, bank, key, EPS, *norm)) < tolerance


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [0, 5])
def test_a_merge_with_the_next_norm(dtype: torch.dtype, tolerance: float, rows: int):
    partial, bank, keys = _random(3, 40).to(dtype), _random(rows, 3, 40, seed=1), _random(2, 40, seed=2)
    summary = [part[1] for part in residual_reference.block_prepare(bank, keys, EPS)]
    norm = (3 * _random(40, seed=3)).to(dtype), EPS
    with recording():
        got = residual.merge_norm(partial, *summary, keys[1], EPS, *norm)
    assert got.dtype == dtype
    want = residual_reference.merge_norm(partial, *summary, keys[1], EPS, *norm)
    assert scaled_error(got, want) < tolerance


def test_chains_of_every_length():
    draw = torch.Generator().manual_seed(0)
    for width in (1, 2, 8):
        candidates = torch.randint(0, 2, (37, width), generator=draw)
        chosen = torch.randint(0, 2, (37, width), generator=draw)
        with recording():
            got = acceptance.chain(candidates, chosen)
        assert torch.equal(got, acceptance_reference.chain(candidates, chosen))
    same = torch.arange(8).repeat(2, 1)
    assert acceptance.chain(same, same + 1).tolist() == [8, 8]
    assert acceptance.chain(same, same).tolist() == [1, 1]
