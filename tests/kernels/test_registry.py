"""The kernel registry: refusals are named, exact calls stay exact, the choice is the preferred one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from sglang_k3.kernels import order, registry, triton_targets
from sglang_k3.kernels.registry import Call, NoImplementation

OPERATOR = "test.operator"


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An operator of the test's own; every choice made while it exists is forgotten."""
    registry.load()
    monkeypatch.setattr(registry, "_choices", {})
    yield OPERATOR
    registry._implementations.pop(OPERATOR, None)


def _add(name: str, answer: object, **options: object) -> None:
    registry.register(OPERATOR, name, **options)(lambda: answer)  # pyright: ignore[reportArgumentType]


def _call(exact: bool = False, **dims: int) -> Call:
    return Call(device="cpu", dtype=torch.float32, exact=exact, dims=dims)


def test_the_preferred_implementation_that_takes_the_call_is_chosen(operator: str) -> None:
    _add("slow", "slow", preference=1)
    _add("wide", "wide", preference=9, supports=lambda call: "K is odd" if call.dims["K"] % 2 else None)
    assert registry.choose(operator, _call(K=4))() == "wide"
    assert registry.choose(operator, _call(K=5))() == "slow"


def test_an_operator_that_only_runs_its_parts_is_no_fused_one(operator: str) -> None:
    _add("parts", "parts", preference=1, composed=True)
    _add(
        "one pass", "one pass", preference=9, supports=lambda call: "K is odd" if call.dims["K"] % 2 else None
    )
    fused = registry.choose_fused(operator, _call(K=4))
    assert fused is not None and fused() == "one pass"
    assert registry.choose_fused(operator, _call(K=5)) is None
    assert registry.choose(operator, _call(K=5))() == "parts"


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("form", ["mix_norm", "merge_norm"])
def test_a_mix_with_its_norm_is_by_default_the_two_operators(device: str, form: str) -> None:
    """So a CPU's bits are those of the two, and an NPU's norm stays torch_npu's."""
    assert registry.choose_fused(f"attention_residual.{form}", Call(device, torch.bfloat16)) is None


def test_refusals_before_the_choice_are_named_and_logged_once(
    operator: str, caplog: pytest.LogCaptureFixture
) -> None:
    _add("slow", "slow", preference=1)
    _add("wide", "wide", preference=9, supports=lambda call: "K is odd")
    _add("npu", "npu", preference=8, device="npu")
    with caplog.at_level(logging.INFO, registry.logger.name):
        chosen, refused = registry.resolve(operator, _call(K=5))
        registry.resolve(operator, _call(K=5))
    assert chosen.name == "slow"
    assert refused == (("wide", "K is odd"), ("npu", "runs on npu, not on cpu"))
    assert [record.getMessage() for record in caplog.records] == [
        f"{operator} -> slow (refused wide: K is odd; npu: runs on npu, not on cpu)"
    ]


def test_no_implementation_lists_every_reason(operator: str) -> None:
    _add("wide", "wide", preference=9, supports=lambda call: "K is odd")
    _add("npu", "npu", preference=8, device="npu")
    _add("reference", "reference", preference=0, device="any")
    with pytest.raises(NoImplementation) as caught:
        registry.choose(operator, _call(exact=True))
    message = str(caught.value)
    assert operator in message
    for refusal in (
        "wide: its rows are not batch-invariant",
        "npu: runs on npu, not on cpu",
        "reference: its rows are not batch-invariant",
    ):
        assert refusal in message


def test_an_exact_call_passes_over_a_preferred_form_that_is_not(operator: str) -> None:
    _add("fast", "fast", preference=9)
    _add("exact", "exact", preference=1, exact=True)
    assert registry.choose(operator, _call())() == "fast"
    assert registry.choose(operator, _call(exact=True))() == "exact"


def test_a_name_is_taken_once(operator: str) -> None:
    _add("fast", 1, preference=9)
    with pytest.raises(ValueError, match="already has an implementation named 'fast'"):
        _add("fast", 2, preference=9)
    assert registry.choose(operator, _call())() == 1


def test_kernels_that_are_asked_first_come_before_all_others(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _add("fast", "fast", preference=9)
    _add("triton", "triton", preference=5)
    _add("slow", "slow", preference=1)
    assert registry.choose(operator, _call())() == "fast"
    monkeypatch.setenv("SGLANG_K3_KERNELS", "triton")
    assert [entry.name for entry in registry.implementations(operator)] == ["triton", "fast", "slow"]
    assert registry.choose(operator, _call())() == "triton"
    monkeypatch.delenv("SGLANG_K3_KERNELS")
    assert registry.choose(operator, _call())() == "fast"


def test_a_call_that_the_kernels_asked_first_refuse_is_a_warning(
    operator: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _add("fast", "fast", preference=9)
    _add("triton", "triton", preference=5, supports=lambda call: "K 5 is no power of two")
    monkeypatch.setenv("SGLANG_K3_KERNELS", "triton")
    with caplog.at_level(logging.INFO, registry.logger.name):
        assert registry.choose(operator, _call(K=5))() == "fast"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"{operator} -> fast (refused triton: K 5 is no power of two)")
    ]


def test_an_order_that_cannot_be_had_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    order.check("cpu")
    order.check("npu")
    monkeypatch.setenv("SGLANG_K3_KERNELS", "cuda")
    for ask in (lambda: order.check("npu"), lambda: registry.implementations("linear")):
        with pytest.raises(ValueError, match="SGLANG_K3_KERNELS=cuda: pass triton, or unset it"):
            ask()
    monkeypatch.setenv("SGLANG_K3_KERNELS", "triton")
    with pytest.raises(ValueError, match=r"=triton: our Triton kernels .* a server on a CPU: unset it"):
        order.check("cpu")


def test_triton_without_an_npus_backend_is_no_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[ModuleSpec] = []
    monkeypatch.setenv("SGLANG_K3_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton_targets.importlib.util, "find_spec", lambda name: next(iter(found), None))
    with pytest.raises(ValueError, match=r"triton-ascend is not installed. Install it, or unset"):
        order.check("npu")
    found.append(ModuleSpec("triton", None, is_package=True))
    found[0].submodule_search_locations = [str(tmp_path)]
    with pytest.raises(ValueError, match="no backend for Ascend NPUs: triton-ascend brings it"):
        order.check("npu")
    with monkeypatch.context() as interpreting:
        interpreting.setenv("TRITON_INTERPRET", "1")
        order.check("npu")
    (tmp_path / "backends" / "ascend").mkdir(parents=True)
    order.check("npu")


@pytest.mark.parametrize(
    "operator_name, dims, reason",
    [
        ("kda.decode", {"K": 96, "V": 128}, "K 96 is no power of two"),
        ("kda.commit", {"K": 96, "V": 128}, "K 96 is no power of two"),
        ("short_conv.extend", {"taps": 3}, "it convolves over 4 tokens, not 3"),
        ("short_conv.commit", {"taps": 3}, "it convolves over 4 tokens, not 3"),
        ("mla.paged_attention", {"page": 64, "latent": 448}, "latent 448 is no power of two"),
    ],
)
def test_sizes_that_a_triton_kernel_does_not_take_are_refused_before_a_call(
    operator_name: str, dims: dict[str, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (entry,) = (one for one in registry.implementations(operator_name) if one.name == "triton")
    fits = {"K": 128, "V": 96, "taps": 4, "page": 64, "latent": 512, "rope": 64, "heads": 12}
    assert entry.refusal(Call("npu", torch.bfloat16, dims=fits)) is None
    assert entry.refusal(Call("npu", torch.bfloat16, dims=fits | dims)) == reason


def test_an_unknown_operator_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(KeyError, match=r"unknown operator 'lineer'.*rms_norm"):
        registry.implementations("lineer")


def test_loading_again_registers_nothing_twice() -> None:
    registry.load()
    before = {name: len(registry.implementations(name)) for name in registry.operators()}
    registry.load()
    assert {name: len(registry.implementations(name)) for name in registry.operators()} == before


@pytest.mark.parametrize("operator_name", registry.operators())
def test_every_operator_has_one_oracle_and_an_exact_fp32_form_on_a_cpu(operator_name: str) -> None:
    entries = registry.implementations(operator_name)
    assert [entry.name for entry in entries if entry.preference == 0] == ["reference"]
    assert entries[-1].device == "any"
    chosen, _ = registry.resolve(operator_name, _call(exact=True))
    assert chosen.exact
    fast, _ = registry.resolve(operator_name, _call())
    assert fast.preference >= chosen.preference


@pytest.mark.parametrize("operator_name", ["linear", "linear_batched", "mla.paged_attention", "moe.experts"])
def test_exact_bf16_products_are_refused_with_the_type_named(operator_name: str) -> None:
    with pytest.raises(NoImplementation, match=r"not torch\.bfloat16"):
        registry.choose(operator_name, Call(device="cpu", dtype=torch.bfloat16, exact=True))
