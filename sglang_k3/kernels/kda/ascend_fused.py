"""KDA pieces by vendors' fused operators: sgl_kernel_npu's gate, and the commit of a CANN package.

What else those packages hold does not fit: sgl_kernel_npu's verify stores a state for each drafted row;
CANN's decode does too, and its verify takes a layer's hidden states and all of its weights.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_k3.kernels.ascend import DEVICE, absent, has_mx, package_function, package_operator, put
from sglang_k3.kernels.kda.ascend import Entering, layer_groups, normalise
from sglang_k3.kernels.registry import Call, register

_HEAD = 128
_COMMIT = "commit_recurrent_kda_replayssm"
_GATE = "sgl_kernel_npu.fla.kda_gate", "fused_kda_gate_npu"


def _gate_supports(call: Call) -> str | None:
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"SGLang calls it with bfloat16 or float16, not {call.dtype}"
    return None if package_function(*_GATE) is not None else absent("sgl_kernel_npu", _GATE[1])


@register(
    "kda.gate", "sgl_kernel_npu fused_kda_gate_npu", preference=20, device=DEVICE, supports=_gate_supports
)
def gate(
    f: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.gate`. Raises ValueError for operands that do not fit."""
    (tokens, columns), heads = f.shape, A_log.shape[0]
    if columns % heads or dt_bias.shape != (columns,) or b.shape != (tokens, heads):
        raise ValueError(
            f"kda.gate: f {tuple(f.shape)}, b {tuple(b.shape)}, A_log {tuple(A_log.shape)} and dt_bias "
            f"{tuple(dt_bias.shape)} do not fit together"
        )
    kernel = package_function(*_GATE)
    assert kernel is not None
    g = kernel(f, A_log, columns // heads, gate_bias=dt_bias, lower_bound=lower_bound)
    return g.view(tokens, heads, -1), b.float().sigmoid()


def _commit_operator() -> Any | None:
    return package_operator(_COMMIT, f"cannbotdsl_{_COMMIT}", _COMMIT)


def _commit_supports(call: Call) -> str | None:
    for name in ("K", "V"):
        if (found := call.dims.get(name, _HEAD)) != _HEAD:
            return f"it is built for {name} {_HEAD}, not {found}"
    if not has_mx():
        return "it is built for the Ascend 950 series"
    return None if _commit_operator() is not None else absent("a CANN package", _COMMIT)


@register(
    "kda.commit", f"CANN {_COMMIT}, u and k in fp16", preference=20, device=DEVICE, supports=_commit_supports
)
def commit(
    state_pools: torch.Tensor,
    slots: torch.Tensor,
    target_slots: torch.Tensor,
    bank_rows: torch.Tensor,
    bank_u: torch.Tensor,
    bank_k: torch.Tensor,
    bank_g: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    track_offsets: torch.Tensor,
    track_slots: torch.Tensor,
    tracking: bool = True,
) -> None:
    """See `ascend.commit`. The operator takes u and k as fp16, so states are within 5e-3 of it.

    It works on packed states in place, so they are gathered and put back. Raises ValueError for a state or
    records of another size or dtype.
    """
    layers, _, heads, *sides = state_pools.shape
    if sides != [_HEAD, _HEAD] or state_pools.dtype != torch.float32:
        raise ValueError(f"kda.commit: states {sides} in {state_pools.dtype} are not 128 by 128 in float32")
    if any(bank.shape[-2:] != (heads, _HEAD) or bank.shape[0] != layers for bank in (bank_u, bank_k, bank_g)):
        raise ValueError(f"kda.commit: records do not fit {layers} layers of {heads} heads of {_HEAD}")
    if not len(slots):
        return
    operator = _commit_operator()
    assert operator is not None
    ring = bank_u.shape[2]
    tracked = (track_offsets, track_slots) if tracking else None
    entering = Entering.of(slots, target_slots, starts, counts, tracked, ring)
    lives = (torch.arange(ring, device=slots.device) < counts.unsqueeze(1)).view(1, -1, ring, 1, 1)
    for part in layer_groups(state_pools, len(slots)):
        # What lies behind the run may be NaN, and is not the operator's to skip.
        u, k, g = (
            torch.where(lives, bank[part][:, bank_rows.unsqueeze(1), entering.at].float(), 0.0).flatten(0, 1)
            for bank in (bank_u, bank_k, bank_g)
        )
        before = state_pools[part][:, entering.places].flatten(0, 1)
        for targets, numbers in entering.writes:
            states = before.clone()
            accepted = torch.where(targets >= 0, numbers, 0).to(torch.int32)
            of_all_layers = accepted.repeat(len(states) // len(slots))
            operator(states, u.half(), normalise(k).half(), g.exp(), of_all_layers)
            for layer, after in zip(state_pools[part], states.unflatten(0, (-1, len(slots))), strict=True):
                put(layer, targets, after)
