"""The training form computes what the reference model computes, and its gradients are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sglang_k3.kernels.mx.reference import dequantize_mxfp4, quantize_mxfp4
from sglang_k3.models.config import ConfigError, K3Config
from sglang_k3.models.reference import ReferenceModel
from sglang_k3.testing import random_checkpoint
from sglang_k3.training.checkpoint import load_checkpoint
from sglang_k3.training.model import CausalConvolution, Experts, TrainingModel, delta_rule
from sglang_k3.training.tiny import tiny_config
from sglang_k3.training.train import backward


@pytest.fixture(scope="module")
def random_k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint.make("k3", tmp_path_factory.mktemp("k3"), experts="mxfp4")


@pytest.fixture(scope="module")
def pair(random_k3: Path) -> tuple[TrainingModel, ReferenceModel]:
    return load_checkpoint(random_k3), ReferenceModel.from_checkpoint(random_k3)


@pytest.mark.parametrize("length", [1, 65, 200])
def test_logits_equal_the_reference_models(pair: tuple[TrainingModel, ReferenceModel], length: int) -> None:
    model, reference = pair
    tokens = torch.randint(500, (length,), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        logits = model.logits(tokens[None])[0]
    expected = reference.forward(tokens).float()
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def test_rows_of_a_batch_do_not_see_each_other(pair: tuple[TrainingModel, ReferenceModel]) -> None:
    model, _ = pair
    rows = torch.randint(500, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = model(rows)
        alone = model(rows[1:2])
    torch.testing.assert_close(together[1:2], alone, atol=1e-4, rtol=0)


def _token_by_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    state = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=q.dtype)
    outputs = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t, :, None].exp()
        u = beta[:, :, t, None] * (v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], state))
        state = state + k[:, :, t, :, None] * u[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    return torch.stack(outputs, 2)


def _rule_inputs(length: int, decay: float | None, dtype: torch.dtype) -> list[torch.Tensor]:
    """decay None: log decays from -5 to 0."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, 3, length, 32, generator=generator, dtype=dtype) for _ in range(3))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    g = -5 * torch.rand(2, 3, length, 32, generator=generator, dtype=dtype)
    if decay is not None:
        g = torch.full_like(g, decay)
    beta = torch.rand(2, 3, length, generator=generator, dtype=dtype)
    return [q, k, v, g, beta]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("decay", [None, -5.0, -1e-3])
def test_chunks_equal_the_recurrence(length: int, decay: float | None) -> None:
    inputs = _rule_inputs(length, decay, torch.float32)
    expected = _token_by_token(*(x.double() for x in inputs))
    torch.testing.assert_close(delta_rule(*inputs).double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("decay", [None, -5.0])
def test_chunk_gradients_equal_the_recurrences(decay: float | None) -> None:
    inputs = [x.requires_grad_() for x in _rule_inputs(40, decay, torch.float32)]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    weight = torch.randn(2, 3, 40, 32, generator=torch.Generator().manual_seed(0))
    (delta_rule(*inputs) * weight).sum().backward()
    (_token_by_token(*doubles) * weight).sum().backward()
    for mine, expected in zip(inputs, doubles, strict=True):
        assert mine.grad is not None and expected.grad is not None
        assert expected.grad.abs().max() > 1e-3
        torch.testing.assert_close(mine.grad.double(), expected.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_convolution_and_its_gradient_equal_torchs(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(2, length, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    taps = torch.randn(4, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    y = CausalConvolution.apply(x, taps)
    padded = F.pad(x.mT, (3, 0))
    torch.testing.assert_close(y, F.conv1d(padded, taps.T[:, None], groups=5).mT)
    assert torch.autograd.gradcheck(CausalConvolution.apply, (x, taps))


def test_sliced_loss_gives_the_whole_losses_gradient() -> None:
    model = TrainingModel(K3Config.from_hf(tiny_config()), seed=1)
    batch = torch.randint(2048, (3, 401), generator=torch.Generator().manual_seed(0))
    loss = backward(model, batch)
    sliced = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    whole = F.cross_entropy(model.logits(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    whole.backward()
    assert loss == pytest.approx(whole.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(sliced[name], parameter.grad, atol=1e-6, rtol=1e-3)
    unused = {
        "model.layers.0.self_attention_res_norm.weight",
        "model.layers.0.self_attention_res_proj.weight",
    }
    assert {name for name, _ in model.named_parameters()} - sliced.keys() == unused


def test_rounded_experts_compute_with_what_is_stored_and_pass_gradients_through() -> None:
    config = K3Config.from_hf(tiny_config())
    experts = next(m for m in TrainingModel(config, seed=2).modules() if isinstance(m, Experts))
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(20, config.expert_size, generator=generator)
    chosen = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(20)])
    weights = torch.rand(20, 4, generator=generator)
    plain = experts(z, weights, chosen)
    experts.quantised = True
    rounded = experts(z, weights, chosen)
    rounded.square().sum().backward()
    through = experts.w1.grad
    with torch.no_grad():
        for stack in (experts.w1, experts.w3, experts.w2):
            stored = dequantize_mxfp4(*quantize_mxfp4(stack.flatten(0, 1)), torch.float32)
            stack.copy_(stored.view_as(stack))
    experts.quantised = False
    experts.zero_grad()
    stored_output = experts(z, weights, chosen)
    stored_output.square().sum().backward()
    torch.testing.assert_close(rounded, stored_output)
    torch.testing.assert_close(through, experts.w1.grad)
    assert (plain - rounded).abs().max() > 1e-3


def test_balancing_moves_choices_to_the_idle_expert() -> None:
    model = TrainingModel(K3Config.from_hf(tiny_config()), seed=3)
    router = model.routers[0]
    x = torch.randn(400, 192, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        router.e_score_correction_bias[5] = -2.0
        router(x, 4)
    assert router.load[5] == 0 and router.load.sum() == 1600
    for _ in range(300):
        router.rebalance(0.01)
        with torch.no_grad():
            weights, chosen = router(x, 4)
    assert router.load[5] > 50
    torch.testing.assert_close(weights.sum(-1), torch.ones(400))
    scores = torch.sigmoid(F.linear(x, router.weight)).gather(1, chosen)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("latent_moe_use_norm", False, "latent"),
        ("routed_scaling_factor", 2.0, "routed_scaling_factor"),
        ("q_lora_rank", None, "q_lora_rank"),
        ("hidden_act", "silu", "situ"),
    ],
)
def test_config_of_another_kind_is_refused(key: str, value: object, named: str) -> None:
    raw = tiny_config()
    raw["text_config"][key] = value
    with pytest.raises(ConfigError, match=named):
        TrainingModel(K3Config.from_hf(raw))
