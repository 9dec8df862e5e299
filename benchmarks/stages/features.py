"""What this project adds to SGLang, cut into pieces that can be turned off one by one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sglang_k3.testing.server_process import draft_flags


@dataclass(frozen=True)
class Feature:
    """One piece of the stack.

    operators: registry operators (or their prefixes) that run on the plain torch reference while the
    feature is off. flags_off: server flags that turn it off. env_off, env_on: variables of the server while
    it is off, and on. model: without it, SGLang's own class serves. draft: it needs a draft model, and is no
    stage of a model that has none; speculates: it turns the draft on. needs: pieces without which it is off.
    """

    name: str
    operators: tuple[str, ...] = ()
    flags_off: tuple[str, ...] = ()
    env_off: tuple[tuple[str, str], ...] = ()
    env_on: tuple[tuple[str, str], ...] = ()
    model: bool = False
    packed: bool = False
    draft: bool = False
    speculates: bool = False
    needs: tuple[str, ...] = ()


SPECULATION, RECORDS = "DSpark speculation", "replay records"
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
    # Without the next one a verify stores the state behind each drafted row (snapshot_operators.py).
    Feature(SPECULATION, draft=True, speculates=True),
    Feature(RECORDS, draft=True, needs=(SPECULATION,)),
    Feature(
        "folded records",
        draft=True,
        env_off=(("SGLANG_K3_RECORDS", "plain"),),
        needs=(SPECULATION, RECORDS),
    ),
    Feature(
        "verify budget",
        draft=True,
        env_on=(("SGLANG_RAGGED_VERIFY_MODE", "compact"),),
        needs=(SPECULATION, RECORDS),
    ),
)
NAMES = tuple(feature.name for feature in FEATURES)
PINNED = 4
"""Tokens a verify step where the accept length is pinned, whatever the draft is worth."""


class Stage(NamedTuple):
    """label; the names of the features that are on; tokens that every verify step accepts, None: what is
    right."""

    label: str
    on: frozenset[str]
    pinned: int | None = None


def of_model(has_draft: bool) -> tuple[Feature, ...]:
    """The pieces that a model can show."""
    return tuple(feature for feature in FEATURES if has_draft or not feature.draft)


def cumulative(has_draft: bool = True) -> list[Stage]:
    """From SGLang's own class to everything."""
    names = [feature.name for feature in of_model(has_draft)]
    stages = [Stage("SGLang's class, plain torch", frozenset())]
    return stages + [
        Stage(f"+ {name}", frozenset(names[: position + 1])) for position, name in enumerate(names)
    ]


def leave_one_out(has_draft: bool = True) -> list[Stage]:
    """Everything but one, and what needs that one. The model class stays: the other pieces are parts of
    it."""
    pieces = of_model(has_draft)
    everything = frozenset(feature.name for feature in pieces)
    return [
        Stage(
            f"all but {f.name}",
            everything - {f.name} - {other.name for other in pieces if f.name in other.needs},
        )
        for f in pieces
        if not f.model
    ]


def pinned(has_draft: bool = True) -> list[Stage]:
    """The stages that speculate, at one accept length; a budget needs drafts that are right or wrong."""
    return [
        Stage(f"{stage.label}, {PINNED} accepted", stage.on, PINNED)
        for stage in cumulative(has_draft)
        if SPECULATION in stage.on and "verify budget" not in stage.on
    ]


def plain_operators(on: frozenset[str]) -> tuple[str, ...]:
    """Operators that run on the reference because their feature is off."""
    return tuple(operator for f in FEATURES if f.name not in on for operator in f.operators)


def stores_snapshots(on: frozenset[str]) -> bool:
    """Whether a verify keeps states and no records."""
    return SPECULATION in on and RECORDS not in on


def server_flags(on: frozenset[str], draft: Path | None = None) -> list[str]:
    """launch_server's flags for these features, with the model's draft if it has one."""
    flags = [flag for f in FEATURES if f.name not in on for flag in f.flags_off]
    if draft is not None and is_on(on, "speculates"):
        flags += draft_flags(draft)
    return flags


def server_env(stage: Stage) -> dict[str, str]:
    """Variables of its server."""
    found = dict(pair for f in FEATURES for pair in (f.env_on if f.name in stage.on else f.env_off))
    if stage.pinned is not None:
        found["SGLANG_SIMULATE_ACC_LEN"] = str(stage.pinned)
        found["SGLANG_SIMULATE_ACC_TOKEN_MODE"] = "real-draft-token"
    return found


def is_on(on: frozenset[str], attribute: str) -> bool:
    """Whether the feature that sets this attribute ("model", "packed", "speculates") is on."""
    return all(f.name in on for f in FEATURES if getattr(f, attribute))
