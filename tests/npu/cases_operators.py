"""Tier (a) and the operators of tier (b): every torch_npu call site against the real schemas on the meta
device, and its values on the emulated NPU against the oracle.

Not proven here: that CANN's kernels compute what references.py says, or accept what their meta kernels do.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sglang_k3
from sglang_k3.kernels.moe import ascend as moe
from sglang_k3.kernels.moe import reference as moe_reference
from sglang_k3.kernels.rms_norm import ascend as norm
from sglang_k3.kernels.rms_norm import reference as norm_reference
from tests.kernels.spans import scaled_error

PACKAGE = Path(sglang_k3.__file__).parent
TOKENS, EXPERTS, TOP_K, WIDTH, INNER = 7, 8, 3, 32, 16


class Recorder(TorchDispatchMode):
    """Which operators of torch_npu were called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "npu":
            self.called.add(func._schema.name.removeprefix("npu::"))
        return func(*args, **(kwargs or {}))


def _made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _ids() -> torch.Tensor:
    return torch.stack([torch.randperm(EXPERTS)[:TOP_K].sort().values for _ in range(TOKENS)])


def norm_inputs() -> tuple[Any, ...]:
    return _made(TOKENS, WIDTH), _made(WIDTH, seed=1), 0.05


def route_inputs() -> tuple[Any, ...]:
    return _made(TOKENS, EXPERTS), _made(EXPERTS, seed=1) / 9, TOP_K, True, 2.5, 1, 1, "sigmoid"


def grouped_route_inputs() -> tuple[Any, ...]:
    return _made(TOKENS, EXPERTS), _made(EXPERTS, seed=1) / 9, TOP_K, True, 2.5, 4, 2, "sigmoid"


def softmax_route_inputs() -> tuple[Any, ...]:
    return _made(TOKENS, EXPERTS), None, TOP_K, True, 1.0, 1, 1, "softmax"


def expert_inputs() -> tuple[Any, ...]:
    torch.manual_seed(3)
    matrices = _made(EXPERTS - 2, 2 * INNER, WIDTH, seed=2) / 5, _made(EXPERTS - 2, WIDTH, INNER, seed=4) / 4
    return _made(TOKENS, WIDTH), _ids(), _made(TOKENS, TOP_K, seed=5).abs(), *matrices, 4.0, 25.0, 1


SITES: list[tuple[str, Any, Callable[..., Any], Callable[[], tuple[Any, ...]]]] = [
    ("rms_norm", norm, norm_reference.rms_norm, norm_inputs),
    ("route", moe, moe_reference.route, route_inputs),
    ("route", moe, moe_reference.route, grouped_route_inputs),
    ("route", moe, moe_reference.route, softmax_route_inputs),
    ("experts", moe, moe_reference.experts, expert_inputs),
]


def _on(device: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.to(device) if isinstance(value, torch.Tensor) else value for value in values)


def _tensors(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


def check(name: str, module: Any, oracle: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    """Shapes and dtypes on meta, values on the emulated NPU. Raises where something differs."""
    want = _tensors(oracle(*inputs))
    shaped = _tensors(getattr(module, name)(*_on("meta", inputs)))
    got = _tensors(getattr(module, name)(*_on("npu", inputs)))
    for found, ours, theirs in zip(shaped, got, want, strict=True):
        assert found.device.type == "meta" and ours.device.type == "npu"
        assert (found.shape, found.dtype) == (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert scaled_error(ours.cpu(), theirs) < 1e-5


@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site[0]}-{site[3].__name__}")
def test_call_site_fits_its_schema_and_computes_the_oracle(emulator, site):
    name, module, oracle, inputs = site
    check(name, module, oracle, inputs())


def test_every_torch_npu_operator_in_the_package_is_among_them(emulator):
    written = {
        operator
        for file in PACKAGE.rglob("*.py")
        for operator in re.findall(r"(?:operators\(\)|npu)\.(npu_\w+)\(", file.read_text())
    }
    with Recorder() as recorder:
        for name, module, _, inputs in SITES:
            getattr(module, name)(*_on("meta", inputs()))
    assert written == recorder.called and len(written) >= 4


def _mutant(module: types.ModuleType, old: str, new: str) -> types.ModuleType:
    """The module with one piece of its source changed."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
    source = source.replace(old, new)
    source = re.sub(r"import Call, register\n", "import Call\n", source)
    source = re.sub(r"import register\n", "import Call\n", source)
    made = types.ModuleType(module.__name__ + "_mutant")
    vars(made)["register"] = lambda *args, **kwargs: lambda function: function
    exec(compile(source, str(module.__file__), "exec"), vars(made))
    return made


MUTATIONS = [
    (norm, "rms_norm", ", eps)[0]", ")[0]"),
    (norm, "rms_norm", "(x, weight.to(x.dtype), eps)[0]", "(weight.to(x.dtype), x, eps)[0]"),
    (norm, "rms_norm", ", eps)[0]", ", eps)[1]"),
    (moe, "route", "        bias=bias,\n", ""),
    (moe, "route", "        k_group=topk_group,\n", ""),
    (
        moe,
        "route",
        "k_group=topk_group,\n        group_count=n_group",
        "k_group=n_group,\n        group_count=topk_group",
    ),
    (
        moe,
        "route",
        "        logits,\n        top_k,\n        bias",
        "        logits.t(),\n        top_k,\n        bias",
    ),
    (moe, "route", 'norm_type=_SIGMOID if activation == "sigmoid" else _SOFTMAX', "norm_type=_SOFTMAX"),
    (moe, "route", "int(bias is not None)", "int(bias is None)"),
    (moe, "experts", "        expert_num=count,\n", "        expert_num=count - 1,\n"),
    (moe, "experts", "        x,\n        chosen,\n", "        chosen,\n        x,\n"),
    (moe, "experts", "        expert_tokens_num_type=_PER_EXPERT_COUNTS,\n", ""),
    (moe, "experts", "        group_list=counts,\n", ""),
    (moe, "experts", ".transpose(1, 2)],", "],"),
    (moe, "experts", "        group_type=_M_AXIS,\n", ""),
    (moe, "experts", "        split_item=_ONE_TENSOR,\n", ""),
    (moe, "experts", "        group_list_type=_PER_EXPERT_COUNTS,\n", ""),
    (moe, "experts", "out[row_index.long()]", "out"),
    (moe, "experts", "shares = weights.masked_fill(elsewhere, 0.0)", "shares = weights"),
]


@pytest.mark.parametrize("module, name, old, new", MUTATIONS, ids=range(len(MUTATIONS)))
def test_a_changed_call_turns_red(emulator, module, name, old, new):
    mutant = _mutant(module, old, new)
    red = 0
    for site, origin, oracle, inputs in SITES:
        if (site, origin) != (name, module):
            continue
        try:
            check(site, mutant, oracle, inputs())
        except (AssertionError, RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            red += 1
    assert red


def test_own_checks_stand_in_front_of_what_torch_npu_lets_pass(emulator):
    x, ids, weights, w13, w2, *betas = expert_inputs()
    for wrong in (
        (x[:, :-1], ids, weights, w13, w2),
        (x, ids[:-1], weights, w13, w2),
        (x, ids, weights, w13, w2[:, :, :-1]),
    ):
        with pytest.raises(ValueError, match="experts"):
            moe.experts(*wrong, *betas)
    with pytest.raises(ValueError, match="rms_norm"):
        norm.rms_norm(_made(2, 4), _made(3), 1e-5)
    with pytest.raises(ValueError, match="route"):
        moe.route(_made(2, 4), _made(3), 2, True, 1.0, 1, 1, "sigmoid")
