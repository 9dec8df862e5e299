"""The whole table, and what an installed SGLang says of the flags in it."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from functools import cache
from typing import Any

from tests.compatibility import families_model, families_running, families_serving
from tests.compatibility.rows import Family

SECTIONS: tuple[tuple[str, tuple[Family, ...]], ...] = (
    ("Model, numbers, kernels", families_model.FAMILIES),
    ("Ranks, scheduler, memory, speculation", families_running.FAMILIES),
    ("Clients, answers, what a server tells", families_serving.FAMILIES),
)

FAMILIES = tuple(family for _, families in SECTIONS for family in families)


@cache
def _actions() -> dict[str, argparse.Action]:
    """What SGLang's parser knows, by the field of ServerArgs that it fills."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {action.dest: action for action in reversed(parser._actions)}


@cache
def options() -> dict[str, str]:
    """Every field of SGLang's ServerArgs: its option on the command line, "" for one without."""
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs

    known = _actions()
    return {
        field.name: known[field.name].option_strings[0] if field.name in known else ""
        for field in record_fields(ServerArgs)
    }


def another_value(name: str, allowed: Collection[Any] = ()) -> list[str]:
    """A command line that gives this field a value which is neither its default nor one of `allowed`."""
    action = _actions()[name]
    option = action.option_strings[0]
    if action.nargs == 0:
        return [option]
    if action.choices:
        return [option, next(str(c) for c in action.choices if c not in (action.default, *allowed))]
    number = isinstance(action.default, int | float) or action.type in (int, float)
    return [option, "3" if number else "x"]


def given() -> list[str]:
    """The command line that holds everything of the rows which change nothing of an answer."""
    return [argument for family in FAMILIES for argument in family.given]
