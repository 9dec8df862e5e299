"""The strict loader and the cutting of parameters for tensor- and expert-parallel ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import nn

from sglang_k3.models.config import K3Config
from sglang_k3.models.names import ExpertShard, canonical, expected_names, is_vision, logical_parameters
from sglang_k3.models.presets import real_k3_config
from sglang_k3.models.reference import unpack_mxfp4
from sglang_k3.models.weights import (
    CheckpointError,
    Placement,
    load,
    load_a_log,
    load_conv,
    load_experts,
    load_sharded_vector,
)
from sglang_k3.testing.random_checkpoint import k3_config, kimi_linear_config, random_tensors
from sglang_k3.testing.transformers_checkpoint import kimi_linear_config as transformers_config
from tests.models.skeleton import Skeleton

VISION_TENSORS = 168

# One KDA layer with a dense MLP, one MLA layer with experts.
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 64,
    "routed_expert_hidden_size": 32,
    "linear_attn_config": {
        "full_attn_layers": [2],
        "kda_layers": [1],
        "num_heads": 4,
        "head_dim": 8,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    },
}
Tensors = dict[str, torch.Tensor]
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.2"


def k3(experts: str = "dense") -> K3Config:
    return K3Config.from_hf(k3_config("float32", experts, SMALL))  # type: ignore[arg-type]


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def test_published_k3_has_the_published_tensors_each_with_a_place_of_its_own():
    config = K3Config.from_hf(real_k3_config())
    placement = Placement(config)
    dtypes: Counter[torch.dtype] = Counter()
    parameters: Counter[str] = Counter()
    names, places = set(), set()
    for tensor in expected_names(config):
        names.add(tensor.name)
        dtypes[tensor.dtype] += 1
        parameters[tensor.name.partition(".")[0]] += logical_parameters(tensor)
        if not is_vision(tensor.name):
            target, rule = placement.find(tensor.name)
            places.add((target, rule.shard))
    assert len(names) == 497_220
    assert dtypes == {torch.uint8: 494_592, torch.bfloat16: 2_122, torch.float32: 506}
    assert parameters == {
        "language_model": 2_779_484_478_208,
        "vision_tower": 401_214_464,
        "mm_projector": 46_144_512,
    }
    assert len(places) == 497_220 - VISION_TENSORS
    assert ("model.layers.92.mlp.experts.w13_packed", ExpertShard(895, "w3")) in places


def test_each_published_name_is_loaded_once_or_skipped_as_vision():
    config = K3Config.from_hf(real_k3_config())
    model = Skeleton(config, tp_rank=3, tp_size=8, device="meta")

    @cache
    def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tensors = ((tensor.name, stand_in(tensor.shape, tensor.dtype)) for tensor in expected_names(config))
    report = load(model, config, tensors)
    assert report.vision_skipped == VISION_TENSORS
    assert report.tensors == 497_220 - VISION_TENSORS
    assert report.parameters == len(list(model.parameters()))


@pytest.mark.parametrize("experts", ["dense", "mxfp4"])
def test_loading_fills_every_element(experts: str):
    config = k3(experts)
    tensors = random_tensors(config, seed=1)
    model = Skeleton(config)
    report = load(model, config, tensors.items())
    assert report.tensors == len(tensors)
    assert report.bytes == sum(tensor.nbytes for tensor in tensors.values())
    for name, filled in model.named_parameters():
        if filled.dtype is torch.uint8:
            # Codes may hold any byte, scales of these sizes lie far below the fill value.
            assert not name.endswith("scale") or (filled != 255).all(), name
        else:
            assert not filled.isnan().any(), name


def test_packed_experts_stay_packed():
    config = k3("mxfp4")
    tensors = random_tensors(config, seed=1)
    model = Skeleton(config)
    load(model, config, tensors.items())
    packed = model.get_parameter("model.layers.1.mlp.experts.w13_packed")
    scale = model.get_parameter("model.layers.1.mlp.experts.w2_scale")
    assert (packed.dtype, packed.shape) == (torch.uint8, (4, 128, 16))
    assert torch.equal(packed[2, :64], tensors[f"{EXPERT}.w1.weight_packed"])
    assert torch.equal(packed[2, 64:], tensors[f"{EXPERT}.w3.weight_packed"])
    assert torch.equal(scale[2], tensors[f"{EXPERT}.w2.weight_scale"])


def test_eight_ranks_share_the_96_heads_and_not_the_padding_of_a_log():
    stored = torch.arange(128.0)
    for rank in range(8):
        own = parameter(12)
        load_a_log(96, rank, 8)(own, stored)
        assert own.tolist() == list(range(12 * rank, 12 * rank + 12))


def test_a_log_of_either_dialect_gives_the_same_heads():
    heads = torch.tensor([3.0, 1.0, 2.0, 5.0])
    for stored in (heads, torch.cat([heads, torch.full((124,), 9.0)]), heads.view(1, 1, 4, 1)):
        own = parameter(2)
        load_a_log(4, 1, 2)(own, stored)
        assert own.tolist() == [2.0, 5.0]


def test_a_rank_holds_the_convolution_of_its_own_heads_in_each_of_q_k_v():
    channels, taps = 8, 4
    thirds = [torch.randn(channels, 1, taps) for _ in range(3)]
    for rank in range(4):
        own = parameter(3 * channels // 4, taps)
        for shard, third in enumerate(thirds):
            load_conv(rank, 4)(own, third, shard)
        expected = torch.cat([third[2 * rank : 2 * rank + 2, 0] for third in thirds])
        assert torch.equal(own, expected)


def test_dt_bias_is_cut_by_rank():
    own = parameter(3)
    load_sharded_vector(2, 4)(own, torch.arange(12.0))
    assert own.tolist() == [6.0, 7.0, 8.0]


def test_tensor_parallel_ranks_add_up_to_the_whole_expert():
    width, inner, ranks = 6, 8, 4
    w1, w3, w2 = torch.randn(inner, width), torch.randn(inner, width), torch.randn(width, inner)
    x = torch.randn(5, width)
    parts = torch.zeros(5, width)
    for rank in range(ranks):
        w13, down = parameter(1, 2 * inner // ranks, width), parameter(1, width, inner // ranks)
        loader = load_experts(0, 1, rank, ranks)
        loader(w13, w1, ExpertShard(0, "w1"))
        loader(w13, w3, ExpertShard(0, "w3"))
        loader(down, w2, ExpertShard(0, "w2"))
        gate, up = (x @ w13[0].T).chunk(2, dim=-1)
        parts += (gate.tanh() * up) @ down[0].T
    torch.testing.assert_close(parts, ((x @ w1.T).tanh() * (x @ w3.T)) @ w2.T)


def test_expert_parallel_ranks_keep_their_range_and_pass_over_the_rest():
    own = parameter(2, 8, 3)
    loader = load_experts(2, 2, 0, 1)
    for expert in range(6):
        for shard, sign in ((ExpertShard(expert, "w1"), 1.0), (ExpertShard(expert, "w3"), -1.0)):
            loader(own, torch.full((4, 3), sign * (expert + 1)), shard)
    assert own[:, 0, 0].tolist() == [3.0, 4.0]
    assert own[:, 7, 2].tolist() == [-3.0, -4.0]


def test_packed_columns_and_their_scales_are_cut_at_the_same_place():
    rows, columns = 4, 128
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scales = torch.randint(120, 130, (rows, columns // 32), dtype=torch.uint8)
    whole = unpack_mxfp4(codes, scales, torch.float32)
    for rank in range(2):
        packed = parameter(1, rows, columns // 4, dtype=torch.uint8)
        scale = parameter(1, rows, columns // 64, dtype=torch.uint8)
        load_experts(0, 1, rank, 2)(packed, codes, ExpertShard(0, "w2"))
        load_experts(0, 1, rank, 2)(scale, scales, ExpertShard(0, "w2"))
        own = unpack_mxfp4(packed[0], scale[0], torch.float32)
        assert torch.equal(own, whole[:, rank * 64 : rank * 64 + 64])


def test_the_transformers_dialect_loads():
    config = K3Config.from_hf(transformers_config("float32", {}))
    tensors = random_tensors(config, seed=2)
    assert "model.layers.0.block_sparse_moe.gate_proj.weight" in tensors
    assert tensors["model.layers.0.self_attn.A_log"].shape == (1, 1, 3, 1)
    model = Skeleton(config)
    load(model, config, tensors.items())
    gate_up = model.get_parameter("model.layers.0.mlp.gate_up_proj.weight")
    assert torch.equal(gate_up[:384], tensors["model.layers.0.block_sparse_moe.gate_proj.weight"])
    assert torch.equal(gate_up[384:], tensors["model.layers.0.block_sparse_moe.up_proj.weight"])
    projections = model.get_parameter("model.layers.4.self_attn.in_proj.weight")
    stored = [tensors[f"model.layers.4.self_attn.{part}_proj.weight"] for part in "qkvb"]
    assert torch.equal(projections, torch.cat(stored))


def test_both_dialects_fill_the_same_model():
    filled = []
    for raw in (kimi_linear_config("float32", {}), transformers_config("float32", {})):
        config = K3Config.from_hf(raw)
        model = Skeleton(config)
        tensors = {canonical(name): tensor for name, tensor in random_tensors(config, seed=3).items()}
        load(model, config, tensors.items())
        filled.append(model.get_parameter("model.layers.1.mlp.experts.w13"))
    assert torch.equal(*filled)


def _without(name: str) -> Callable[[Tensors], Iterator[tuple[str, torch.Tensor]]]:
    return lambda tensors: ((key, value) for key, value in tensors.items() if key != name)


def _with(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Iterator[tuple[str, torch.Tensor]]]:
    return lambda tensors: iter({**tensors, name: tensor}.items())


AT = "language_model.model.layers"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(f"{AT}.0.self_attn.k_proj.weight"), f"lacks .*{AT}.0.self_attn.k_proj.weight"),
        (_without(f"{AT}.0.self_attn.v_conv1d.weight"), f"lacks .*{AT}.0.self_attn.v_conv1d.weight"),
        (_without(f"{EXPERT}.w3.weight"), f"lacks .*{EXPERT}.w3.weight"),
        (_without("language_model.lm_head.weight"), "lacks .*language_model.lm_head.weight"),
        (_with(f"{AT}.1.self_attn.rotary.weight", torch.ones(1)), "rotary.weight: unknown tensor"),
        (_with(f"{AT}.2.input_layernorm.weight", torch.ones(64)), "num_hidden_layers=2"),
        (_with(f"{AT}.1.block_sparse_moe.experts.4.w1.weight", torch.ones(64, 32)), "num_experts=4"),
        (_with(f"{EXPERT}.w1.weight_packed", torch.ones(64, 16, dtype=torch.uint8)), "quantization_config"),
        (_with("classifier.weight", torch.ones(1)), "classifier.weight: unknown tensor"),
        (_with(f"{AT}.0.self_attn.q_proj.weight", torch.ones(33, 64)), r"shape \[33, 64\].*\[32, 64\]"),
        (_with(f"{AT}.0.self_attn.A_log", torch.ones(3)), r"A_log has shape \[3\]"),
        (_with(f"{EXPERT}.w2.weight", torch.ones(32, 64, dtype=torch.uint8)), "asks for floating point"),
        (_with(f"{AT}.0.block_sparse_moe.gate_proj.weight", torch.ones(96, 64)), "twice"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(change, message: str):
    config = k3()
    tensors = random_tensors(config, seed=1)
    with pytest.raises(CheckpointError, match=message):
        load(Skeleton(config), config, change(tensors))


def test_plain_experts_under_a_packed_config_name_the_remedy():
    config = k3("mxfp4")
    with pytest.raises(CheckpointError, match="experts are MXFP4: remove quantization_config"):
        load(Skeleton(config), config, [(f"{EXPERT}.w1.weight", torch.ones(64, 32))])


def test_a_parameter_that_nothing_fills_is_named():
    config = k3()
    model = Skeleton(config)
    model.register_parameter("extra", parameter(3))
    with pytest.raises(CheckpointError, match="no checkpoint tensor fills extra"):
        load(model, config, random_tensors(config, seed=1).items())


def test_a_tensor_without_its_parameter_is_named():
    config = k3()
    model = Skeleton(config)
    del model.get_submodule("model.norm")._parameters["weight"]
    with pytest.raises(CheckpointError, match=r"model.norm.weight: the model has no parameter"):
        load(model, config, random_tensors(config, seed=1).items())


def test_a_parameter_of_another_size_is_not_filled_by_broadcasting():
    config = k3()
    model = Skeleton(config)
    model.get_submodule("model.output_attn_res_proj").weight = parameter(5, 64)
    with pytest.raises(CheckpointError, match=r"output_attn_res_proj.weight \[1, 64\] does not fit"):
        load(model, config, random_tensors(config, seed=1).items())


def test_many_missing_tensors_are_counted_instead_of_listed():
    config = k3()
    expected = sum(1 for _ in expected_names(config))
    with pytest.raises(CheckpointError, match=f"and {expected - 5} more"):
        load(Skeleton(config), config, [])


def test_a_rank_says_which_it_is():
    config = k3()
    with pytest.raises(CheckpointError, match="rank 1 of 2: the checkpoint lacks"):
        load(Skeleton(config, tp_rank=1, tp_size=2), config, [], tp_rank=1, tp_size=2)


def test_vision_tensors_are_counted_and_left_alone():
    config = k3()
    tensors = random_tensors(config, seed=1)
    vision = {
        "vision_tower.encoder.final_layernorm.weight": torch.ones(3),
        "mm_projector.post_norm.weight": torch.ones(3),
    }
    report = load(Skeleton(config), config, {**tensors, **vision}.items())
    assert (report.vision_skipped, report.tensors) == (2, len(tensors))
