"""What this project adds to SGLang, cut into pieces that can be turned off one by one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """One piece of the stack.

    operators: registry operators (or their prefixes) that run on the plain torch reference while the
    feature is off. flags_off: server flags that turn it off. Without `model`, SGLang's own class serves.
    """

    name: str
    operators: tuple[str, ...] = ()
    flags_off: tuple[str, ...] = ()
    model: bool = False
    packed: bool = False


FEATURES = (
    Feature("our model class", model=True),
    Feature("compiled KDA", ("short_conv", "kda")),
    Feature("grouped experts", ("moe",)),
    Feature("paged MLA", ("mla",)),
    Feature("compiled norms and gates", ("rms_norm", "gated_rms_norm", "activation", "output_gate")),
    Feature("two-phase residuals", ("attention_residual",)),
    Feature("packed MXFP4 experts", packed=True),
    Feature("prefix cache", flags_off=("--disable-radix-cache",)),
    Feature("overlap scheduling", flags_off=("--disable-overlap-schedule",)),
)
NAMES = tuple(feature.name for feature in FEATURES)


def cumulative() -> list[tuple[str, frozenset[str]]]:
    """(label, features that are on) of each stage, from SGLang's own class to everything."""
    stages = [("SGLang's class, plain torch", frozenset[str]())]
    return stages + [(f"+ {name}", frozenset(NAMES[: position + 1])) for position, name in enumerate(NAMES)]


def leave_one_out() -> list[tuple[str, frozenset[str]]]:
    """Everything but one. The model class stays: the other pieces are parts of it."""
    return [
        (f"all but {feature.name}", frozenset(NAMES) - {feature.name})
        for feature in FEATURES
        if not feature.model
    ]


def plain_operators(on: frozenset[str]) -> tuple[str, ...]:
    """Operators that run on the reference because their feature is off."""
    return tuple(operator for f in FEATURES if f.name not in on for operator in f.operators)


def server_flags(on: frozenset[str]) -> list[str]:
    return [flag for f in FEATURES if f.name not in on for flag in f.flags_off]


def is_on(on: frozenset[str], attribute: str) -> bool:
    """Whether the feature that sets this attribute ("model", "packed") is on."""
    return all(f.name in on for f in FEATURES if getattr(f, attribute))
