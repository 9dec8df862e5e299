"""Our Triton kernels beside SGLang's, which nobody here wrote: both interpreted, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from sglang.kernels.ops.attention.fla import fused_recurrent
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn, causal_conv1d_update

from sglang_k3.kernels.kda import ascend_triton, ascend_triton_block, ascend_triton_chunk
from sglang_k3.kernels.short_conv import ascend_triton as conv
from tests.kernels.kda_cases import KDAInputs, decode, extend, kda_inputs, one, states
from tests.kernels.spans import scaled_error, spans
from tests.kernels.test_kda_records import WIDTH, banks, run_commit, run_verify

TOLERANCE = 2e-6
VERIFIES = pytest.mark.parametrize(
    "verify", [ascend_triton.verify, ascend_triton_block.verify], ids=["row by row", "products"]
)


@pytest.fixture(autouse=True)
def alias_of_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter can't follow their module's alias of tl.exp, so it is taken again at call time."""
    monkeypatch.setattr(fused_recurrent, "exp", lambda x: tl.exp(x))


def _recurrence(inputs: KDAInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's (fla's) recurrent KDA over the tokens of one request: o [T, H, V] and the state behind."""
    (tokens, heads, value_dim), key_dim = inputs.v.shape, inputs.k.shape[2]
    o, after = torch.empty_like(inputs.v), state.clone()
    kernel: Any = fused_recurrent.fused_recurrent_gated_delta_rule_fwd_kernel
    rows = 8
    kernel[(1, -(-value_dim // rows), heads)](
        *inputs.tensors,
        o,
        state,
        after,
        None,
        inputs.scale,
        T=tokens,
        B=1,
        H=heads,
        HV=heads,
        K=key_dim,
        V=value_dim,
        BK=key_dim,
        BV=rows,
        USE_INITIAL_STATE=True,
        STORE_FINAL_STATE=True,
        IS_BETA_HEADWISE=False,
        USE_QK_L2NORM_IN_KERNEL=True,
        IS_VARLEN=False,
        IS_KDA=True,
    )
    return o, after


def test_decode_is_flas_recurrence():
    inputs = kda_inputs(1, value_dim=40)
    pool = states(inputs, 3)
    want, after = _recurrence(inputs, pool[2])
    got = decode(ascend_triton.decode, inputs, pool, torch.tensor([2]))
    assert scaled_error(got, want) < TOLERANCE and scaled_error(pool[2], after) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 77])
def test_chunks_are_flas_recurrence(tokens: int):
    inputs = kda_inputs(tokens)
    pool = states(inputs, 2)
    want, after = _recurrence(inputs, pool[1])
    got = extend(ascend_triton_chunk.extend, inputs, pool, one(tokens))
    assert scaled_error(got, want) < 5e-6 and scaled_error(pool[1], after) < 5e-6


@VERIFIES
def test_a_verified_draft_is_flas_recurrence(verify: Callable):
    inputs = kda_inputs(WIDTH)
    pool = states(inputs, 3)
    want, _ = _recurrence(inputs, pool[2])
    got = run_verify(verify, inputs, pool, [2], [WIDTH], [1], banks(inputs, 2))
    assert scaled_error(got, want) < TOLERANCE


@VERIFIES
@pytest.mark.parametrize("accepted, tracked", [(1, 1), (5, 2), (WIDTH, WIDTH)])
def test_what_is_accepted_leaves_the_state_of_flas_recurrence(verify: Callable, accepted: int, tracked: int):
    inputs = kda_inputs(WIDTH)
    pool = states(inputs, 4)
    (_, after), (_, kept) = (_recurrence(inputs.rows(0, count), pool[2]) for count in (accepted, tracked))
    bank = banks(inputs, 2)
    run_verify(verify, inputs, pool, [2], [WIDTH], [1], bank)
    run_commit(ascend_triton.commit, pool, [2], [1], bank, [accepted], [(tracked, 3)])
    assert scaled_error(pool[2], after) < TOLERANCE and scaled_error(pool[3], kept) < TOLERANCE


# --- the convolution ---------------------------------------------------------------------------------------


def _conv_case(tokens: int, channels: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, C], weight [C, 4], windows [5, 3, C]."""
    draw = torch.Generator().manual_seed(tokens)
    x, weight = torch.randn(tokens, channels, generator=draw), torch.randn(channels, 4, generator=draw)
    return x, weight, torch.randn(5, 3, channels, generator=draw)


def test_the_convolution_of_a_prompt_is_sglangs():
    lengths, fresh = [9, 1, 70], [False, True, False]
    x, weight, windows = _conv_case(sum(lengths))
    batch = spans(lengths, slots=[4, 1, 2], fresh=fresh)
    theirs = windows.clone()
    want = causal_conv1d_fn(
        x.T,
        weight,
        None,
        theirs.transpose(1, 2),
        batch.cu_seqlens.int(),
        lengths,
        cache_indices=batch.slots.int(),
        has_initial_state=~batch.fresh,
    ).T
    got = conv.extend(x, weight, windows, *batch.arguments)
    assert scaled_error(got, want) < TOLERANCE and torch.equal(windows, theirs)


def test_the_convolution_of_a_step_is_sglangs():
    x, weight, windows = _conv_case(2)
    slots, theirs = torch.tensor([3, 1]), windows.clone()
    want = causal_conv1d_update(
        x, theirs.transpose(1, 2), weight, activation="silu", conv_state_indices=slots.int()
    )
    got = conv.decode(x, weight, windows, slots)
    assert scaled_error(got, want) < TOLERANCE and torch.equal(windows, theirs)
