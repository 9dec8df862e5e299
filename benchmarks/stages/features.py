"""What this project adds to SGLang, cut into pieces that can be turned off one by one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_k3.testing.server_process import draft_flags


@dataclass(frozen=True)
class Feature:
    """One piece of the stack.

    operators: registry operators (or their prefixes) that run on the plain torch reference while the
    feature is off. flags_off: server flags that turn it off. Without `model`, SGLang's own class serves.
    draft: it needs a draft model, and is no stage of a model that has none.
    """

    name: str
    operators: tuple[str, ...] = ()
    flags_off: tuple[str, ...] = ()
    model: bool = False
    packed: bool = False
    draft: bool = False


SPECULATION = "DSpark speculation"
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
    Feature(SPECULATION, draft=True),
)
NAMES = tuple(feature.name for feature in FEATURES)


def of_model(has_draft: bool) -> tuple[Feature, ...]:
    """The pieces that a model can show."""
    return tuple(feature for feature in FEATURES if has_draft or not feature.draft)


def cumulative(has_draft: bool = True) -> list[tuple[str, frozenset[str]]]:
    """(label, features that are on) of each stage, from SGLang's own class to everything."""
    names = [feature.name for feature in of_model(has_draft)]
    stages = [("SGLang's class, plain torch", frozenset[str]())]
    return stages + [(f"+ {name}", frozenset(names[: position + 1])) for position, name in enumerate(names)]


def leave_one_out(has_draft: bool = True) -> list[tuple[str, frozenset[str]]]:
    """Everything but one. The model class stays: the other pieces are parts of it."""
    pieces = of_model(has_draft)
    everything = frozenset(feature.name for feature in pieces)
    return [(f"all but {f.name}", everything - {f.name}) for f in pieces if not f.model]


def plain_operators(on: frozenset[str]) -> tuple[str, ...]:
    """Operators that run on the reference because their feature is off."""
    return tuple(operator for f in FEATURES if f.name not in on for operator in f.operators)


def server_flags(on: frozenset[str], draft: Path | None = None) -> list[str]:
    """launch_server's flags for these features, with the model's draft if it has one."""
    flags = [flag for f in FEATURES if f.name not in on for flag in f.flags_off]
    if draft is not None and is_on(on, "draft"):
        flags += draft_flags(draft)
    return flags


def is_on(on: frozenset[str], attribute: str) -> bool:
    """Whether the feature that sets this attribute ("model", "packed", "draft") is on."""
    return all(f.name in on for f in FEATURES if getattr(f, attribute))
