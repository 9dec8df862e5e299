"""Our implementations that call an operator of a vendor's, each with inputs and what must come out.

A site is run on the meta device, where its calls meet the operators' schemas, and on the emulated NPU, where
their references compute. What a site returns includes the pools that it wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sglang_k3.kernels.activation import ascend as activation
from sglang_k3.kernels.activation import reference as activation_reference
from sglang_k3.kernels.kda import ascend_fused as kda
from sglang_k3.kernels.kda import reference as kda_reference
from sglang_k3.kernels.mla import ascend_fused as mla
from sglang_k3.kernels.mla import reference as mla_reference
from sglang_k3.kernels.moe import ascend as moe
from sglang_k3.kernels.moe import ascend_mx as moe_mx
from sglang_k3.kernels.moe import reference as moe_reference
from sglang_k3.kernels.mx.reference import dequantize_mxfp8, quantize_mxfp4
from sglang_k3.kernels.rms_norm import ascend as norm
from sglang_k3.kernels.rms_norm import reference as norm_reference
from sglang_k3.kernels.rotary import ascend as rotary
from sglang_k3.kernels.rotary import reference as rotary_reference
from sglang_k3.kernels.short_conv import ascend_fused as conv
from sglang_k3.kernels.short_conv import reference as conv_reference
from tests.kernels.spans import scaled_error
from tests.npu.references import REFERENCES

TOKENS, EXPERTS, TOP_K, WIDTH, INNER = 7, 8, 3, 128, 64


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Site:
    """function: the implementation. run: of a device; oracle: the same on the CPU. Both return tensors.
    tolerance: of scaled errors."""

    name: str
    function: Callable[..., Any]
    run: Callable[[str], tuple[torch.Tensor, ...]]
    oracle: Callable[[], tuple[torch.Tensor, ...]]
    tolerance: float = 1e-5

    def check(self, on: str = "meta npu") -> None:
        """Shapes and dtypes on meta, values on the emulated NPU. Raises where something differs."""
        want = _wanted(self)
        for device in on.split():
            for ours, theirs in zip(self.run(device), want, strict=True):
                assert ours.device.type == device
                assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
                if device == "npu":
                    assert scaled_error(ours.cpu(), theirs) < self.tolerance


@cache
def _wanted(site: Site) -> tuple[torch.Tensor, ...]:
    return site.oracle()


def on(device: str, *values: Any) -> list[Any]:
    """Copies of the tensors there, also of those in tuples."""
    moved = []
    for value in values:
        if isinstance(value, tuple):
            moved.append(tuple(on(device, *value)))
        else:
            moved.append(value.to(device, copy=True) if isinstance(value, torch.Tensor) else value)
    return moved


def plain(
    name: str,
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    inputs: Callable[[], tuple[Any, ...]],
    tolerance: float = 1e-5,
    **named: Any,
) -> Site:
    """Same arguments for both; a result is a tensor or a tuple of them."""

    def tuple_of(value: Any) -> tuple[torch.Tensor, ...]:
        return value if isinstance(value, tuple) else (value,)

    def run(device: str) -> tuple[torch.Tensor, ...]:
        return tuple_of(ours(*on(device, *inputs()), **named))

    return Site(name, ours, run, lambda: tuple_of(theirs(*inputs())), tolerance)


# --- norms, activations, rotary ----------------------------------------------------------------------------


def norm_inputs() -> tuple[Any, ...]:
    return made(TOKENS, WIDTH), made(WIDTH, seed=1), 0.05


def gated_inputs(beta: float | None, linear_beta: float | None) -> tuple[Any, ...]:
    return 3 * made(TOKENS, WIDTH), beta, linear_beta


def rotary_inputs() -> tuple[Any, ...]:
    angles = made(TOKENS, 8, seed=2)
    return made(TOKENS, 3, 16), angles.cos(), angles.sin()


# --- experts -----------------------------------------------------------------------------------------------


def route_inputs(groups: int, kept: int, activation: str, bias: bool = True) -> tuple[Any, ...]:
    biases = made(EXPERTS, seed=1) / 9 if bias else None
    return made(TOKENS, EXPERTS), biases, TOP_K, True, 2.5, groups, kept, activation


def _chosen() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randperm(EXPERTS, generator=generator)[:TOP_K].sort().values for _ in range(TOKENS)]
    return torch.stack(ids), made(TOKENS, TOP_K, seed=5).abs()


def _matrices() -> tuple[torch.Tensor, torch.Tensor]:
    return made(EXPERTS - 2, 2 * INNER, WIDTH, seed=2) / 9, made(EXPERTS - 2, WIDTH, INNER, seed=4) / 6


def expert_inputs() -> tuple[Any, ...]:
    return made(TOKENS, WIDTH), *_chosen(), *_matrices(), 4.0, 25.0, 1


def packed_inputs() -> tuple[Any, ...]:
    packed = []
    for matrix in _matrices():
        codes, scales = quantize_mxfp4(matrix.flatten(0, 1))
        packed += [codes.unflatten(0, matrix.shape[:2]), scales.unflatten(0, matrix.shape[:2])]
    return made(TOKENS, WIDTH).bfloat16(), *_chosen(), *packed, 4.0, 25.0, 1


def unpacked_inputs() -> tuple[Any, ...]:
    x, *rest = packed_inputs()
    return x.float(), *rest


def quantised_experts(x: torch.Tensor, ids, weights, w13, s13, w2, s2, *rest: Any) -> torch.Tensor:
    """`reference.experts_mxfp4` with rows rounded as the operator's document says, expert by expert."""
    from sglang_k3.kernels.mx.reference import dequantize_mxfp4

    beta, linear_beta, first = rest

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        values, steps = REFERENCES["npu_dynamic_mx_quant"](rows, dst_type=torch.float8_e4m3fn)
        return dequantize_mxfp8(values, steps.flatten(1), torch.float32)

    total = torch.zeros(x.shape)
    for expert in range(w13.shape[0]):
        gate_up, down = (
            dequantize_mxfp4(w[expert], s[expert], torch.float32) for w, s in ((w13, s13), (w2, s2))
        )
        token, choice = torch.where(ids == first + expert)
        inner = (rounded(x[token]) @ gate_up.T).to(x.dtype)
        hidden = rounded(activation_reference.gated(inner, beta, linear_beta)) @ down.T
        total[token] += weights[token, choice].unsqueeze(1) * hidden.to(x.dtype).float()
    return total.to(x.dtype)


# --- attention ---------------------------------------------------------------------------------------------

LATENT, ROPE, HEADS = 512, 64, 6
_COUNTS, _PREFIXES = (3, 1, 2), (130, 5, 250)


def attention_inputs() -> tuple[Any, ...]:
    """Three requests of 3, 1 and 2 new rows and one row of padding, over pages of 128 in any order."""
    pages = torch.tensor([[3, 0], [2, 1], [5, 4]])
    table = (pages.unsqueeze(2) * 128 + torch.arange(128)).flatten(1)
    cache = made(6 * 128, LATENT + ROPE).bfloat16()
    cache[4 * 128 : 5 * 128] = float("nan")  # the short request's table points there, behind its end
    q = made(sum(_COUNTS) + 1, HEADS, LATENT + ROPE, seed=1).bfloat16()
    cu_seqlens = torch.tensor([0, *torch.tensor(_COUNTS).cumsum(0).tolist()])
    return q, cache, table, torch.tensor([0, 2, 1]), cu_seqlens, torch.tensor(_PREFIXES), 0.05, LATENT


def _attention_lengths() -> tuple[list[int], list[int]]:
    return list(_COUNTS), [p + c for p, c in zip(_PREFIXES, _COUNTS, strict=True)]


def _attend(which: Callable[..., torch.Tensor], joined: bool) -> Callable[[str], tuple[torch.Tensor, ...]]:
    def run(device: str) -> tuple[torch.Tensor, ...]:
        q, cache, *rest = attention_inputs()
        given = cache if joined else (cache[:, :LATENT].contiguous(), cache[:, LATENT:].contiguous())
        q, given, *rest = on(device, q, given, *rest)
        return (which(q, given, *rest, reach=256, width=3, lengths=_attention_lengths),)

    return run


def _attended() -> tuple[torch.Tensor, ...]:
    q, cache, *rest = attention_inputs()
    return (mla_reference.paged_attention(q, cache, *rest),)


# --- KDA ---------------------------------------------------------------------------------------------------


def gate_inputs(lower_bound: float | None) -> tuple[Any, ...]:
    f, b = made(TOKENS, 2 * 16).bfloat16(), made(TOKENS, 2, seed=1).bfloat16()
    return f, b, made(2, seed=2), made(2 * 16, seed=3), lower_bound


def conv_inputs() -> tuple[torch.Tensor, ...]:
    x, weight = made(3, 32).bfloat16(), made(32, 4, seed=1).bfloat16().float()
    return x, weight, made(5, 3, 32, seed=2).bfloat16(), torch.tensor([4, -1, 2])


def _conv(step: Callable[..., torch.Tensor], device: str) -> tuple[torch.Tensor, ...]:
    x, weight, windows, slots = on(device, *conv_inputs())
    return step(x, weight, windows, slots), windows


def commit_inputs() -> tuple[Any, ...]:
    """Two layers, three requests (one without a slot), a checkpoint inside one run."""
    layers, rows, ring, heads = 2, 4, 5, 2
    pools = made(layers, 6, heads, 128, 128)
    u, k = (made(layers, rows, ring, heads, 128, seed=seed).half().float() for seed in (1, 2))
    g = -made(layers, rows, ring, heads, 128, seed=3).abs() / 4
    u[:, 1, 4], k[:, 1, 4], g[:, 1, 4] = (torch.tensor(float("nan")),) * 3
    numbers = [[2, -1, 4], [2, -1, 4], [1, 2, 3]], [[0, 0, 3], [4, 2, 5], [3, 1, -1], [5, 3, 1]]
    slots, targets, bank_rows = (torch.tensor(one) for one in numbers[0])
    return pools, slots, targets, bank_rows, u, k, g, *(torch.tensor(one) for one in numbers[1])


def _commit(step: Callable[..., None], device: str) -> tuple[torch.Tensor, ...]:
    arguments = on(device, *commit_inputs())
    step(*arguments)
    return (arguments[0],)


SITES = (
    plain("rms_norm", norm.rms_norm, norm_reference.rms_norm, norm_inputs),
    plain("SiLU", activation.gated, activation_reference.gated, lambda: gated_inputs(None, None)),
    plain("SiTU", activation.situ, activation_reference.gated, lambda: gated_inputs(3.0, 20.0)),
    plain("rotary", rotary.rotary, rotary_reference.rotary, rotary_inputs),
    plain("route", moe.route, moe_reference.route, lambda: route_inputs(1, 1, "sigmoid")),
    plain("route in groups", moe.route, moe_reference.route, lambda: route_inputs(4, 2, "sigmoid")),
    plain("route, softmax", moe.route, moe_reference.route, lambda: route_inputs(1, 1, "softmax", False)),
    plain("experts", moe.experts, moe_reference.experts, expert_inputs),
    plain("experts, MXFP4", moe_mx.experts_quantised, quantised_experts, packed_inputs, 1e-2),
    plain("experts, unpacked", moe_mx.experts_unpacked, moe_reference.experts_mxfp4, unpacked_inputs),
    Site(
        "fused-infer attention",
        mla.fused_infer_attention,
        _attend(mla.fused_infer_attention, False),
        _attended,
        1e-2,
    ),
    Site("flash MLA", mla.flash_mla, _attend(mla.flash_mla, True), _attended, 1e-2),
    plain("KDA gate", kda.gate, kda_reference.gate, lambda: gate_inputs(-5.0)),
    plain("KDA gate, unbounded", kda.gate, kda_reference.gate, lambda: gate_inputs(None)),
    Site(
        "convolution step",
        conv.decode,
        lambda device: _conv(conv.decode, device),
        lambda: _conv(conv_reference.decode, "cpu"),
        1e-2,
    ),
    Site(
        "commit",
        kda.commit,
        lambda device: _commit(kda.commit, device),
        lambda: _commit(kda_reference.commit, "cpu"),
        5e-3,
    ),
)
