"""Router and routed experts: SGLang's routers, ties, groups, ranks, MXFP4, bits in exact mode."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from sglang.srt.layers.moe.topk import biased_grouped_topk_impl, grouped_topk_gpu

from sglang_k3.kernels.moe import cpu, cpu_router, packed_cpu, reference
from sglang_k3.kernels.mx.reference import dequantize_mxfp4, quantize_mxfp4
from tests.kernels.invariance import check_rows_keep_their_bits, same_bits

Route = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Experts = Callable[..., torch.Tensor]
ROUTERS = [reference.route, cpu_router.route]
EXPERTS = [reference.experts, cpu.experts, cpu.experts_row_dots]
PACKED = [
    reference.experts_mxfp4,
    cpu.experts_mxfp4,
    packed_cpu.experts_mxfp4,
    packed_cpu.experts_mxfp4_decoded,
]
TOKENS = [0, 1, 7, 16, 17, 100]
BETAS = (4.0, 25.0)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _by_id(weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = ids.argsort(dim=1)
    return weights.gather(1, order), ids.gather(1, order).long()


# --- router -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTERS)
@pytest.mark.parametrize("tokens", TOKENS[1:])
@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (8, 3), (8, 8)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_biased_sigmoid_routing_agrees_with_sglang(
    route: Route, tokens: int, n_group: int, topk_group: int, renormalize: bool
) -> None:
    logits, bias = _random(tokens, 64) * 2, _random(64, seed=1) * 0.3
    with torch.compiler.set_stance("force_eager"):
        theirs = biased_grouped_topk_impl(
            logits, logits, bias, 6, renormalize, n_group, topk_group,
            routed_scaling_factor=2.5, apply_routed_scaling_factor_on_output=True,
        )  # fmt: skip
    weights, ids = route(logits, bias, 6, renormalize, 2.5, n_group, topk_group, "sigmoid")
    want_weights, want_ids = _by_id(*theirs)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("route", ROUTERS)
@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (4, 2)])
def test_routing_without_a_bias_agrees_with_sglang(
    route: Route, activation: str, n_group: int, topk_group: int
) -> None:
    logits = _random(33, 24) * 3
    with torch.compiler.set_stance("force_eager"):
        theirs = grouped_topk_gpu(logits, logits, 4, True, n_group, topk_group, scoring_func=activation)
    weights, ids = route(logits, None, 4, True, 1.0, n_group, topk_group, activation)
    want_weights, want_ids = _by_id(*theirs)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=2e-6, atol=0)


@pytest.mark.parametrize("route", ROUTERS)
@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
@pytest.mark.parametrize("n_group", [1, 4])
def test_no_tokens_are_routed_nowhere(route: Route, activation: str, n_group: int) -> None:
    weights, ids = route(torch.zeros(0, 24), torch.zeros(24), 4, True, 1.0, n_group, 1, activation)
    assert (weights.shape, weights.dtype, ids.shape, ids.dtype) == (
        (0, 4),
        torch.float32,
        (0, 4),
        torch.int64,
    )


@pytest.mark.parametrize("route", ROUTERS)
def test_the_bias_selects_and_does_not_weigh(route: Route) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    weights, ids = route(logits, torch.tensor([0.0, -9.0, 0.0, 9.0]), 2, False, 1.0, 1, 1, "sigmoid")
    assert ids.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, torch.sigmoid(torch.tensor([[2.0, -1.0]])))


@pytest.mark.parametrize("route", ROUTERS)
def test_weights_are_scores_over_their_sum_times_the_scaling(route: Route) -> None:
    logits = torch.log(torch.tensor([[3.0, 1 / 3, 1.0]]))  # sigmoids 3/4, 1/4, 1/2
    for renormalize, want in ((True, [1.5, 1.0]), (False, [1.875, 1.25])):
        weights, ids = route(logits, None, 2, renormalize, 2.5, 1, 1, "sigmoid")
        assert ids.tolist() == [[0, 2]]
        torch.testing.assert_close(weights, torch.tensor([want]))


@pytest.mark.parametrize("route", ROUTERS)
@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_ties_go_to_the_lower_index(route: Route, activation: str) -> None:
    logits = torch.zeros(3, 40)
    logits[1, [7, 30, 31]] = 1.0
    logits[2, 39] = 2.0
    _, ids = route(logits, None, 5, True, 1.0, 1, 1, activation)
    assert ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 7, 30, 31], [0, 1, 2, 3, 39]]


@pytest.mark.parametrize("route", ROUTERS)
def test_saturated_scores_are_ties_too(route: Route) -> None:
    logits = torch.tensor([[100.0, 200.0, 50.0, 300.0]])  # every sigmoid is 1 in fp32
    weights, ids = route(logits, None, 2, True, 1.0, 1, 1, "sigmoid")
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("route", ROUTERS)
def test_tied_groups_go_to_the_lower_index(route: Route) -> None:
    for bias in (None, torch.zeros(12)):
        _, ids = route(torch.zeros(2, 12), bias, 4, True, 1.0, 4, 2, "sigmoid")
        assert ids.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("route", ROUTERS)
def test_a_groups_worth_is_its_two_best_with_a_bias_and_its_best_without(route: Route) -> None:
    # Groups {0, 1, 2}, {3, 4, 5}: the first has the best score, the second the better pair.
    logits = torch.tensor([[3.0, -3.0, -3.0, 2.0, 2.0, -4.0]])
    assert route(logits, None, 2, True, 1.0, 2, 1, "sigmoid")[1].tolist() == [[0, 1]]
    assert route(logits, torch.zeros(6), 2, True, 1.0, 2, 1, "sigmoid")[1].tolist() == [[3, 4]]


@pytest.mark.parametrize("route", ROUTERS)
def test_groups_of_one_expert(route: Route) -> None:
    _, ids = route(_random(5, 8), torch.zeros(8), 3, True, 1.0, 8, 3, "sigmoid")
    assert torch.equal(ids, _random(5, 8).topk(3).indices.sort().values)


@pytest.mark.parametrize("route", ROUTERS)
def test_scores_too_small_to_sum_do_not_divide_by_zero(route: Route) -> None:
    weights, ids = route(torch.full((1, 6), -200.0), None, 2, True, 1.0, 1, 1, "sigmoid")
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.0, 0.0]]


def test_garbage_logits_still_give_distinct_experts_in_range() -> None:
    logits = _random(4, 24)
    logits[0] = math.nan
    logits[1, ::2] = math.nan
    logits[2] = -math.inf
    _, ids = cpu_router.route(logits, torch.zeros(24), 4, True, 1.0, 4, 2, "sigmoid")
    assert ((ids >= 0) & (ids < 24)).all()
    assert (ids.diff(dim=1) > 0).all()


@pytest.mark.parametrize("route", ROUTERS)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation": "tanh"}, "sigmoid or softmax"),
        ({"n_group": 5}, "cannot form 5 groups"),
        ({"topk_group": 5}, "of which 5 are kept"),
        ({"topk_group": 0}, "of which 0 are kept"),
        ({"top_k": 13}, "top_k = 13 of the 12"),
        ({"top_k": 0}, "top_k = 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(route: Route, change: dict[str, object], reason: str) -> None:
    sizes = {"top_k": 4, "n_group": 4, "topk_group": 2, "activation": "sigmoid", **change}
    with pytest.raises(ValueError, match=reason):
        route(torch.zeros(1, 24), None, renormalize=True, scaling=1.0, **sizes)


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (3, 2)])
def test_routed_rows_keep_their_bits(activation: str, n_group: int, topk_group: int) -> None:
    logits, bias = _random(35, 57), _random(57, seed=1) * 0.1
    check_rows_keep_their_bits(
        lambda index: cpu_router.route(logits[index], bias, 7, True, 1.5, n_group, topk_group, activation), 35
    )


# --- experts ------------------------------------------------------------------------------------------

WIDTH, INNER, COUNT, TOP_K = 64, 32, 12, 4  # MX blocks hold 32 columns


def _chosen(tokens: int, experts: int = COUNT) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [T, TOP_K] ascending and weights [T, TOP_K]."""
    ids = _random(tokens, experts, seed=3).topk(TOP_K).indices.sort().values
    return ids, torch.rand(tokens, TOP_K, generator=torch.Generator().manual_seed(4))


def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    return _random(COUNT, 2 * INNER, WIDTH, seed=1) / 8, _random(COUNT, WIDTH, INNER, seed=2) / 5


def _packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = []
    for weight in _weights():
        for tensor in quantize_mxfp4(weight.flatten(0, 1)):
            parts.append(tensor.unflatten(0, weight.shape[:2]))
    return parts[0], parts[1], parts[2], parts[3]


def _one_by_one(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """The sum of the paper, token by token and expert by expert, in fp64; ids that w13 lacks are left out."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for expert, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            if 0 <= expert < w13.shape[0]:
                gate, up = (w13[expert].double() @ x[t].double()).chunk(2)
                inner = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
                out[t] += weight * (w2[expert].double() @ inner)
    return out


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_experts_match_the_sum_token_by_token(experts: Experts, tokens: int) -> None:
    x, (ids, weights) = _random(tokens, WIDTH), _chosen(tokens)
    got = experts(x, ids, weights, *_weights(), *BETAS)
    torch.testing.assert_close(got.double(), _one_by_one(x, ids, weights, *_weights()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("experts", PACKED)
@pytest.mark.parametrize("tokens", TOKENS)
def test_packed_experts_match_the_sum_over_unpacked_weights(experts: Experts, tokens: int) -> None:
    x, (ids, weights) = _random(tokens, WIDTH), _chosen(tokens)
    packed = _packed()
    w13, w2 = (
        dequantize_mxfp4(p.flatten(0, 1), s.flatten(0, 1), torch.float32).unflatten(0, p.shape[:2])
        for p, s in (packed[:2], packed[2:])
    )
    got = experts(x, ids, weights, *packed, *BETAS)
    torch.testing.assert_close(got.double(), _one_by_one(x, ids, weights, w13, w2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("experts", EXPERTS)
def test_silu_experts(experts: Experts) -> None:
    x, (ids, weights) = _random(5, WIDTH), _chosen(5)
    w13, w2 = _weights()
    want = torch.zeros(5, WIDTH, dtype=torch.float64)
    for t in range(5):
        for k in range(TOP_K):
            gate, up = (w13[ids[t, k]].double() @ x[t].double()).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            want[t] += weights[t, k].double() * (w2[ids[t, k]].double() @ inner)
    torch.testing.assert_close(
        experts(x, ids, weights, w13, w2, None, None).double(), want, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("experts", EXPERTS)
def test_ranks_add_up_to_the_whole(experts: Experts) -> None:
    x, (ids, weights) = _random(33, WIDTH), _chosen(33)
    w13, w2 = _weights()
    whole = experts(x, ids, weights, w13, w2, *BETAS)
    parts = [
        experts(x, ids, weights, w13[first : first + 4], w2[first : first + 4], *BETAS, first_expert=first)
        for first in (0, 4, 8)
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)
    assert all(part.abs().max() > 0 for part in parts)


@pytest.mark.parametrize("experts", PACKED)
def test_packed_ranks_add_up_to_the_whole(experts: Experts) -> None:
    x, (ids, weights) = _random(33, WIDTH), _chosen(33)
    packed = _packed()
    whole = experts(x, ids, weights, *packed, *BETAS)
    parts = [
        experts(x, ids, weights, *(part[first : first + 6] for part in packed), *BETAS, first_expert=first)
        for first in (0, 6)
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("experts", EXPERTS)
def test_experts_of_other_ranks_and_absent_ones_add_nothing(experts: Experts) -> None:
    x, (ids, weights) = _random(6, WIDTH), _chosen(6)
    w13, w2 = _weights()
    assert experts(x, ids, weights, w13, w2, *BETAS, first_expert=100).abs().max() == 0
    assert experts(x, torch.full_like(ids, -1), weights, w13, w2, *BETAS).abs().max() == 0
    assert experts(x, ids, weights, w13, w2, *BETAS, first_expert=-COUNT).abs().max() == 0


@pytest.mark.parametrize("experts", [cpu.experts_mxfp4])
def test_only_experts_with_tokens_are_unpacked(experts: Experts, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = _random(5, WIDTH), torch.ones(5, 2)
    ids = torch.tensor([[1, 7], [1, 7], [1, 9], [7, 9], [-1, 40]])
    w13, w13_scale, w2, w2_scale = _packed()
    for scale in (w13_scale, w2_scale):
        untouched = torch.ones(COUNT, dtype=torch.bool)
        untouched[[1, 7, 9]] = False
        scale[untouched] = 255  # NaN wherever it is read
    unpacked = []

    def count(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        unpacked.append(packed.shape[0])
        return dequantize_mxfp4(packed, scale, dtype)

    monkeypatch.setattr(cpu, "dequantize_mxfp4", count)
    out = experts(x, ids, weights, w13, w13_scale, w2, w2_scale, *BETAS)
    assert torch.isfinite(out).all() and (out[:4] != 0).all() and (out[4] == 0).all()
    assert unpacked == [2 * INNER, WIDTH] * 3


@pytest.mark.parametrize("experts", EXPERTS[:2])
def test_bf16_experts_sum_wide(experts: Experts) -> None:
    x, (ids, weights) = _random(17, WIDTH).bfloat16(), _chosen(17)
    w13, w2 = (weight.bfloat16() for weight in _weights())
    out = experts(x, ids, weights, w13, w2, *BETAS)
    assert out.dtype == torch.bfloat16
    want = _one_by_one(x, ids, weights, w13, w2)
    assert (out.double() - want).abs().max() < 0.01 * want.abs().max()


def test_exact_experts_keep_their_bits() -> None:
    # 60 rows with 4 of 12 experts each: about 20 rows an expert, so some take a second block.
    x, (ids, weights), (w13, w2) = _random(60, WIDTH), _chosen(60), _weights()
    assert ids.flatten().bincount().max() > 16
    check_rows_keep_their_bits(
        lambda index: cpu.experts_row_dots(x[index], ids[index], weights[index], w13, w2, *BETAS), 60
    )


def test_exact_packed_experts_keep_their_bits() -> None:
    x, (ids, weights), packed = _random(60, WIDTH), _chosen(60), _packed()
    check_rows_keep_their_bits(
        lambda index: packed_cpu.experts_mxfp4_decoded(x[index], ids[index], weights[index], *packed, *BETAS),
        60,
    )


def test_exact_experts_do_not_depend_on_the_order_of_a_rows_choices() -> None:
    x, (ids, weights), (w13, w2) = _random(9, WIDTH), _chosen(9), _weights()
    other = [2, 0, 3, 1]
    assert same_bits(
        cpu.experts_row_dots(x, ids[:, other], weights[:, other], w13, w2, *BETAS),
        cpu.experts_row_dots(x, ids, weights, w13, w2, *BETAS),
    )
