"""The reference model: against transformers where that exists, by hand for what only K3 has."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import KimiLinearForCausalLM

from sglang_k3.models.config import K3Config
from sglang_k3.models.reference import ReferenceModel, Trace, top2_gap, unpack_mxfp4
from sglang_k3.testing.random_checkpoint import k3_config, make, random_tensors

LINEAR = {"num_heads": 2, "head_dim": 16, "use_full_rank_gate": True, "gate_lower_bound": -5.0}
TWO_LAYERS = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "linear_attn_config": {**LINEAR, "kda_layers": [1], "full_attn_layers": [2]},
}
FIVE_LAYERS = {
    "num_hidden_layers": 5,
    "hidden_size": 64,
    "attn_res_block_size": 2,
    "linear_attn_config": {**LINEAR, "kda_layers": [1, 2, 3], "full_attn_layers": [4, 5]},
}
KDA, MLA = "model.layers.0.self_attn.", "model.layers.1.self_attn."
MOE = "model.layers.1.mlp."


def tokens(count: int) -> Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(count))


def k3(
    text_config: dict[str, Any], change: Callable[[dict[str, Tensor]], None] | None = None
) -> ReferenceModel:
    """A tiny K3 in fp64; `change` edits its tensors, by their canonical names, first."""
    config = K3Config.from_hf(k3_config("float32", "dense", text_config))
    tensors = {
        name.removeprefix("language_model.").replace("block_sparse_moe", "mlp"): tensor.double()
        for name, tensor in random_tensors(config, seed=4).items()
    }
    if change is not None:
        change(tensors)
    return ReferenceModel(config, tensors)


def inputs(count: int, width: int = 64) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@pytest.fixture(scope="module", params=["kimi-linear-transformers", "kimi-linear"])
def kimi_linear(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in either dialect; transformers fixes the eps of the latent norm at 1e-6."""
    directory = make(request.param, tmp_path_factory.mktemp(request.param))
    file = directory / "config.json"
    if request.param == "kimi-linear":
        file.write_text(json.dumps({**json.loads(file.read_text()), "kv_a_layernorm_eps": 1e-6}))
    return directory


def test_kimi_linear_gives_the_logits_of_transformers(kimi_linear: Path):
    theirs = KimiLinearForCausalLM.from_pretrained(kimi_linear, dtype=torch.float32)
    ours = ReferenceModel.from_checkpoint(kimi_linear, torch.float32)
    for count in (1, 63, 64, 65, 200):
        prompt = tokens(count)
        with torch.no_grad():
            expected = theirs(prompt[None]).logits[0]
        assert expected.std() > 2
        torch.testing.assert_close(ours.forward(prompt), expected, rtol=0, atol=1e-4)


def test_float32_follows_float64(tmp_path: Path):
    directory = make("k3", tmp_path, experts="mxfp4")
    exact, trace = ReferenceModel.from_checkpoint(directory, torch.float64), Trace()
    rounded = ReferenceModel.from_checkpoint(directory, torch.float32)
    prompt = tokens(40)
    expected = exact.forward(prompt, trace=trace)
    assert min(gap.min().item() for gap in trace.expert_gaps.values()) > 1e-6
    torch.testing.assert_close(rounded.forward(prompt).double(), expected, rtol=0, atol=1e-3)


def test_chunks_and_single_steps_give_the_logits_of_one_pass():
    model = k3(FIVE_LAYERS)
    prompt = tokens(23)
    whole = model.forward(prompt)
    state = model.new_state()
    parts = [model.forward(prompt[:9], state), model.forward(prompt[9:11], state)]
    parts += [model.step(int(token), state)[None] for token in prompt[11:]]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-12)


def test_no_token_sees_a_later_one():
    model = k3(FIVE_LAYERS)
    prompt = tokens(12)
    other = prompt.clone()
    other[8:] = (other[8:] + 1) % 256
    before, after = model.forward(prompt), model.forward(other)
    torch.testing.assert_close(after[:8], before[:8], rtol=0, atol=1e-12)
    assert (after[8] - before[8]).abs().max() > 0.1


def test_trace_holds_what_each_layer_read_and_left():
    model = k3(FIVE_LAYERS)
    trace = Trace()
    model.forward(tokens(6), trace=trace)
    assert [len(trace.mixtures), len(trace.sums)] == [5, 5]
    assert {tensor.shape for tensor in trace.mixtures + trace.sums} == {(6, 64)}
    assert sorted(trace.experts) == sorted(trace.expert_gaps) == [1, 2, 3, 4]
    experts = trace.experts[3]
    assert experts.shape == (6, 4) and (experts.diff(dim=-1) > 0).all()


# Residual blocks


def test_blocks_restart_from_the_attention_output_and_the_bank_keeps_what_was_before_the_mix():
    """Five layers in blocks of two, by the schedule: boundaries at 0, 2 and 4."""
    model = k3(FIVE_LAYERS)
    trace = Trace()
    prompt = tokens(5)
    logits = model.forward(prompt, trace=trace)
    weights = model.tensors

    def mix(name: str, *candidates: Tensor) -> Tensor:
        scores = []
        for v in candidates:
            key = v / (v.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}_norm.weight"]
            scores.append((key * weights[f"{name}_proj.weight"]).sum(-1).exp())
        return sum(s[:, None] * v for s, v in zip(scores, candidates, strict=True)) / sum(scores)[:, None]  # type: ignore[index,return-value]

    embedding = weights["model.embed_tokens.weight"][prompt]
    ends = trace.sums
    torch.testing.assert_close(trace.mixtures[0], embedding)
    expected = {
        1: mix("model.layers.1.self_attention_res", embedding, ends[0]),
        2: mix("model.layers.2.self_attention_res", embedding, ends[1]),
        3: mix("model.layers.3.self_attention_res", embedding, ends[1], ends[2]),
        4: mix("model.layers.4.self_attention_res", embedding, ends[1], ends[3]),
    }
    for layer, mixture in expected.items():
        torch.testing.assert_close(trace.mixtures[layer], mixture)
    out = mix("model.output_attn_res", embedding, ends[1], ends[3], ends[4])
    normed = out / (out.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights["model.norm.weight"]
    torch.testing.assert_close(logits, normed @ weights["lm_head.weight"].T)


def test_a_block_sum_holds_its_own_layers_only():
    """With every output of layers 2 to 4 at zero, the sum behind a boundary is zero, not the old sum."""

    def silence(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if any(f"layers.{layer}." in name for layer in (2, 3, 4)) and name.endswith(
                ("o_proj.weight", "shared_experts.down_proj.weight", "routed_expert_up_proj.weight")
            ):
                tensor.zero_()

    trace = Trace()
    k3(FIVE_LAYERS, silence).forward(tokens(4), trace=trace)
    assert trace.sums[1].abs().max() > 0.1
    for layer in (2, 3, 4):
        assert trace.sums[layer].abs().max() == 0


def test_a_zero_query_averages_the_candidates():
    def flatten(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.3.self_attention_res_proj.weight"].zero_()

    model, trace, prompt = k3(FIVE_LAYERS, flatten), Trace(), tokens(4)
    model.forward(prompt, trace=trace)
    embedding = model.tensors["model.embed_tokens.weight"][prompt]
    torch.testing.assert_close(trace.mixtures[3], (embedding + trace.sums[1] + trace.sums[2]) / 3)


# KDA


def test_first_token_of_kda_by_hand():
    """S is empty, so u = beta v and o = (q . k) u, from the state with u in it."""
    model = k3(TWO_LAYERS)
    x = inputs(1)
    w = {name.removeprefix(KDA): tensor for name, tensor in model.tensors.items() if name.startswith(KDA)}

    def activated(part: str) -> Tensor:
        raw = (x @ w[f"{part}_proj.weight"].T)[0] * w[f"{part}_conv1d.weight"][:, 0, -1]
        return (raw / (1 + (-raw).exp())).view(2, 16)

    q, k, v = (activated(part) for part in "qkv")
    q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() / 4
    k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    beta = torch.sigmoid(x @ w["b_proj.weight"].T)[0]
    o = (q * k).sum(-1, keepdim=True) * beta[:, None] * v
    o = o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w["o_norm.weight"]
    gate = torch.sigmoid(x @ w["g_proj.weight"].T)[0]
    expected = (o.flatten() * gate) @ w["o_proj.weight"].T
    torch.testing.assert_close(model._kda(x, KDA, model.new_state()[0])[0], expected)


def test_memory_decays_by_the_bounded_gate():
    """A second token with beta near 0 leaves S times the decay of its own gate."""

    def shut_beta(tensors: dict[str, Tensor]) -> None:
        tensors[f"{KDA}b_proj.weight"].zero_()
        tensors[f"{KDA}b_proj.weight"][:, 0] = -1e3

    model = k3(TWO_LAYERS, shut_beta)
    w = model.tensors
    state = model.new_state()[0]
    x = inputs(2).abs()
    memory = state.memory = torch.randn(2, 16, 16, dtype=torch.float64)
    model._kda(x[:1], KDA, state)
    f = x[0] @ w[f"{KDA}f_a_proj.weight"].T @ w[f"{KDA}f_b_proj.weight"].T + w[f"{KDA}dt_bias"]
    rate = w[f"{KDA}A_log"][:2].exp().repeat_interleave(16)
    decay = torch.exp(-5 / (1 + torch.exp(-rate * f))).view(2, 16)
    torch.testing.assert_close(state.memory, memory * decay[:, :, None])
    assert math.exp(-5) <= decay.min() and decay.max() < 1


@pytest.mark.parametrize(("push", "log_decay"), [(1e4, -5.0), (-1e4, 0.0)])
def test_the_gate_stays_between_its_bounds(push: float, log_decay: float):
    def push_gate(tensors: dict[str, Tensor]) -> None:
        tensors[f"{KDA}dt_bias"].fill_(push)
        tensors[f"{KDA}v_proj.weight"].zero_()
        tensors[f"{KDA}b_proj.weight"].zero_()
        tensors[f"{KDA}k_proj.weight"].zero_()

    model = k3(TWO_LAYERS, push_gate)
    state = model.new_state()[0]
    state.memory = torch.ones(2, 16, 16, dtype=torch.float64)
    model._kda(inputs(3), KDA, state)
    torch.testing.assert_close(state.memory, torch.full_like(state.memory, math.exp(3 * log_decay)))


def test_the_delta_rule_replaces_what_a_key_held():
    """With beta = 1 and no decay, S holds the last value written under a unit key."""

    def pin(tensors: dict[str, Tensor]) -> None:
        tensors[f"{KDA}dt_bias"].fill_(-1e4)
        tensors[f"{KDA}b_proj.weight"].fill_(1e3)

    model = k3(TWO_LAYERS, pin)
    state = model.new_state()[0]
    state.memory = torch.randn(2, 16, 16, dtype=torch.float64)
    x = inputs(1).abs()
    model._kda(x, KDA, state)
    raw = {part: (x @ model.tensors[f"{KDA}{part}_proj.weight"].T)[0] for part in "kv"}
    taps = {part: model.tensors[f"{KDA}{part}_conv1d.weight"][:, 0, -1] for part in "kv"}
    k, v = (torch.nn.functional.silu(raw[part] * taps[part]).view(2, 16) for part in "kv")
    k = k / k.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(torch.einsum("hkv,hk->hv", state.memory, k), v, rtol=0, atol=1e-4)


def test_padding_behind_a_log_means_nothing():
    def scramble(tensors: dict[str, Tensor]) -> None:
        assert tensors[f"{KDA}A_log"].shape == (128,)
        tensors[f"{KDA}A_log"][2:] = float("nan")

    prompt = tokens(5)
    assert torch.equal(k3(TWO_LAYERS, scramble).forward(prompt), k3(TWO_LAYERS).forward(prompt))


def test_the_window_keeps_the_last_three_rows_in_front_of_the_convolution():
    model = k3(TWO_LAYERS)
    state = model.new_state()[0]
    x = inputs(5)
    model._kda(x, KDA, state)
    expected = torch.cat([x[2:] @ model.tensors[f"{KDA}{part}_proj.weight"].T for part in "qkv"], dim=-1)
    torch.testing.assert_close(state.window, expected)


# MLA


def test_mla_by_hand_on_two_tokens():
    model = k3(TWO_LAYERS)
    mla = model.config.mla
    x = inputs(2)
    w = {name.removeprefix(MLA): tensor for name, tensor in model.tensors.items() if name.startswith(MLA)}

    def norm(v: Tensor, name: str) -> Tensor:
        return v / (v.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]

    q = norm(x @ w["q_a_proj.weight"].T, "q_a_layernorm") @ w["q_b_proj.weight"].T
    compressed = x @ w["kv_a_proj_with_mqa.weight"].T
    own = norm(compressed[:, :64], "kv_a_layernorm") @ w["kv_b_proj.weight"].T
    heads = []
    for head in range(mla.num_heads):
        query = q[1, head * 48 : head * 48 + 48]
        rows = own[:, head * 80 : head * 80 + 80]
        keys = torch.cat([rows[:, :32], compressed[:, 64:]], dim=-1)
        p = torch.softmax(keys @ query / math.sqrt(48), dim=0)
        heads.append(p @ rows[:, 32:])
    gate = torch.sigmoid(x[1] @ w["g_proj.weight"].T)
    expected = (torch.cat(heads) * gate) @ w["o_proj.weight"].T
    torch.testing.assert_close(model._mla(x, MLA, model.new_state()[1])[1], expected)


def test_mla_knows_no_positions():
    model = k3(TWO_LAYERS)
    x = inputs(6)
    shuffled = x[[3, 0, 4, 1, 2, 5]]
    last, same = (model._mla(rows, MLA, model.new_state()[1])[5] for rows in (x, shuffled))
    torch.testing.assert_close(same, last)


# Feed-forward


def test_situ_bounds_both_branches():
    """Both projections as identities: beta tanh(g / beta) sigmoid(g) * 25 tanh(u / 25)."""

    def identity(tensors: dict[str, Tensor]) -> None:
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensor = tensors[f"model.layers.0.mlp.{name}.weight"]
            tensor.copy_(torch.eye(*tensor.shape, dtype=tensor.dtype))

    model = k3(TWO_LAYERS, identity)
    values = [-1000.0, -30.0, -1.25, 0.0, 0.5, 3.0, 40.0, 1000.0]
    x = torch.zeros(1, 64, dtype=torch.float64)
    x[0, :8] = torch.tensor(values, dtype=torch.float64)
    out = model._mlp(x, "model.layers.0.mlp.")[0]
    for value, got in zip(values, out.tolist(), strict=False):
        sigmoid = 1 / (1 + math.exp(-value)) if value > -700 else 0.0
        expected = 4 * math.tanh(value / 4) * sigmoid * 25 * math.tanh(value / 25)
        assert got == pytest.approx(expected, rel=1e-12, abs=1e-300)
    assert out[7] == pytest.approx(100.0)
    assert (out[8:] == 0).all()


def test_router_bias_chooses_but_does_not_weigh():
    def favour(tensors: dict[str, Tensor]) -> None:
        bias = tensors[f"{MOE}gate.e_score_correction_bias"]
        bias.zero_()
        bias[[2, 5, 11, 13]] = 10.0

    model = k3(TWO_LAYERS, favour)
    x = inputs(3)
    weights, chosen, _ = model._route(x, MOE)
    assert chosen.tolist() == [[2, 5, 11, 13]] * 3
    scores = torch.sigmoid(x @ model.tensors[f"{MOE}gate.weight"].T)[:, [2, 5, 11, 13]]
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


def test_ties_in_the_router_go_to_the_lower_expert():
    def level(tensors: dict[str, Tensor]) -> None:
        tensors[f"{MOE}gate.weight"].zero_()
        tensors[f"{MOE}gate.e_score_correction_bias"].zero_()

    weights, chosen, gap = k3(TWO_LAYERS, level)._route(inputs(2), MOE)
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.25] * 4] * 2
    assert gap.tolist() == [0.0, 0.0]


def test_expert_gap_is_the_margin_of_the_last_expert_chosen():
    def ladder(tensors: dict[str, Tensor]) -> None:
        tensors[f"{MOE}gate.weight"].zero_()
        tensors[f"{MOE}gate.e_score_correction_bias"].copy_(torch.arange(16) ** 2 / 100)

    _, chosen, gap = k3(TWO_LAYERS, ladder)._route(inputs(1), MOE)
    assert chosen.tolist() == [[12, 13, 14, 15]]
    assert gap.item() == pytest.approx(1.44 - 1.21)


def test_groups_are_chosen_before_experts():
    def groups(tensors: dict[str, Tensor]) -> None:
        tensors[f"{MOE}gate.weight"].zero_()
        bias = torch.zeros(16)
        bias[[0, 1, 4, 5, 8]] = torch.tensor([3.0, 3.0, 2.0, 2.0, 4.5])
        tensors[f"{MOE}gate.e_score_correction_bias"].copy_(bias)

    # The best single expert, 8, loses: its group's best two sum to less than the other groups'.
    shape = {"num_expert_group": 4, "topk_group": 1, "num_experts_per_token": 2}
    _, chosen, _ = k3({**TWO_LAYERS, **shape}, groups)._route(inputs(1), MOE)
    assert chosen.tolist() == [[0, 1]]
    _, chosen, _ = k3({**TWO_LAYERS, "num_experts_per_token": 2}, groups)._route(inputs(1), MOE)
    assert chosen.tolist() == [[0, 8]]


def test_latent_experts_by_hand():
    """Down, weighted sum over experts, norm behind the sum, up, plus the shared experts."""
    model = k3(TWO_LAYERS)
    x = inputs(1)
    w = {name.removeprefix(MOE): tensor for name, tensor in model.tensors.items() if name.startswith(MOE)}

    def mlp(v: Tensor, gate: str, up: str, down: str) -> Tensor:
        g, u = v @ w[gate].T, v @ w[up].T
        return (4 * (g / 4).tanh() * g.sigmoid() * 25 * (u / 25).tanh()) @ w[down].T

    scores = torch.sigmoid(x @ w["gate.weight"].T)[0]
    chosen = (scores + w["gate.e_score_correction_bias"]).topk(4).indices
    z = x @ w["routed_expert_down_proj.weight"].T
    y = torch.zeros_like(z)
    for expert in chosen.tolist():
        at = f"experts.{expert}."
        out = mlp(z, f"{at}w1.weight", f"{at}w3.weight", f"{at}w2.weight")
        y += scores[expert] / scores[chosen].sum() * out
    y = y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w["routed_expert_norm.weight"]
    shared = "shared_experts."
    expected = y @ w["routed_expert_up_proj.weight"].T + mlp(
        x, f"{shared}gate_proj.weight", f"{shared}up_proj.weight", f"{shared}down_proj.weight"
    )
    torch.testing.assert_close(model._moe(x, MOE, 1, Trace()), expected)


def test_packed_experts_compute_what_their_values_say(tmp_path: Path):
    packed = make("k3", tmp_path / "packed", experts="mxfp4", text_config=TWO_LAYERS)
    dense = make("k3", tmp_path / "dense", experts="dense", text_config=TWO_LAYERS)
    prompt = tokens(9)
    logits = [ReferenceModel.from_checkpoint(directory).forward(prompt) for directory in (packed, dense)]
    assert torch.equal(*logits)


def test_mxfp4_codes():
    """Low nibble first, sign in bit 3, one exponent for 32 columns."""
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] + [0x22] * 24], dtype=torch.uint8)
    scale = torch.tensor([[127, 125]], dtype=torch.uint8)
    values = unpack_mxfp4(codes, scale, torch.float64)[0]
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert values[:16].tolist() == positive + [-value for value in positive]
    assert values[16:32].tolist() == [1.0] * 16
    assert values[32:].tolist() == [0.25] * 32


def test_top2_gap():
    assert top2_gap(torch.tensor([[1.0, 5.0, 2.5], [3.0, 3.0, 0.0]])).tolist() == [2.5, 0.0]
