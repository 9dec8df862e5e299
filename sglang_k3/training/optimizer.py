"""Muon for the matrices inside the layers, AdamW for all else.

Muon replaces a matrix's momentum by the nearest semi-orthogonal matrix, so that every direction moves
alike (K. Jordan, "Muon", 2024; Moonshot trains with it too, arXiv 2502.16982).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

MUON_RATE = 0.02
ADAM_RATE = 3e-3
_MOMENTUM = 0.95
_WEIGHT_DECAY = 0.05
_STEPS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients that bring singular values of 0.01 to 1 near 1 in `_STEPS` iterations."""


def is_muon(name: str, parameter: Tensor) -> bool:
    """Matrices that map hidden rows to hidden rows. Embeddings, queries, the router and vectors are not."""
    if parameter.dim() < 2 or "conv1d" in name or "res_proj" in name:
        return False
    return not name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight"))


def orthogonalised(stack: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix of each [R, C] of a stack [..., R, C], roughly."""
    wide = stack if stack.shape[-2] <= stack.shape[-1] else stack.mT
    x = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x if wide is stack else x.mT


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; matrices of one shape go through together."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = MUON_RATE):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - _MOMENTUM)
                update = parameter.grad.lerp(momentum, _MOMENTUM)
                rows, columns = parameter.shape[-2:]
                by_shape[rows, columns].append((parameter, update.reshape(-1, rows, columns)))
            for (rows, columns), members in by_shape.items():
                directions = orthogonalised(torch.cat([update for _, update in members]))
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                sizes = [len(update) for _, update in members]
                for (parameter, _), direction in zip(members, directions.split(sizes), strict=True):
                    parameter.mul_(1 - group["lr"] * _WEIGHT_DECAY)
                    parameter.add_(direction.view_as(parameter), alpha=-rate)


class Optimizer:
    """Both optimisers under one learning-rate factor."""

    def __init__(self, model: nn.Module, is_matrix: Callable[[str, Tensor], bool] = is_muon):
        """is_matrix(name, parameter): whether Muon moves it."""
        matrices, decayed, plain = [], [], []
        for name, parameter in model.named_parameters():
            if is_matrix(name, parameter):
                matrices.append(parameter)
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                decayed.append(parameter)
            else:
                plain.append(parameter)
        groups = [
            {"params": decayed, "weight_decay": _WEIGHT_DECAY},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(groups, lr=ADAM_RATE, betas=(0.9, 0.95), fused=True)

    def step(self, factor: float) -> None:
        """One update at `factor` times the full rates; clears the gradients."""
        for optimizer, rate in ((self.muon, MUON_RATE), (self.adam, ADAM_RATE)):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
