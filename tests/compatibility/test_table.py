"""The table of what works names every flag of the installed SGLang, and tests that exist."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from sglang_k3.refused_flags import REFUSALS
from tests.compatibility.__main__ import PAGE
from tests.compatibility.features import FEATURES, SURROUNDINGS
from tests.compatibility.markdown import page
from tests.compatibility.rows import Outcome
from tests.compatibility.table import FAMILIES, given, options
from tests.environment import ROOT


def names(fields: str) -> list[str]:
    return fields.split()


def test_each_flag_of_sglang_belongs_to_one_family() -> None:
    placed = Counter(name for family in FAMILIES for name in names(family.flags + " " + family.settings))
    assert not [name for name, times in placed.items() if times > 1]
    assert sorted(options().keys() - placed.keys()) == [], "flags that no family lists"
    assert sorted(placed.keys() - options().keys()) == [], "flags that this SGLang does not have"


def test_the_page_is_the_tables() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.compatibility`"


ROWS = [(row.name, test) for row in (*FAMILIES, *FEATURES, *SURROUNDINGS) for test in row.shown_by]


@pytest.mark.parametrize("row, test", ROWS, ids=[f"{row}: {test}" for row, test in ROWS])
def test_what_shows_a_row_exists(row: str, test: str) -> None:
    file, _, function = test.partition("::")
    assert (ROOT / file).exists()
    if function:
        tree = ast.parse((ROOT / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_what_is_claimed_is_shown() -> None:
    assert not [
        family.name for family in FAMILIES if (family.outcome is Outcome.UNTRIED) == bool(family.shown_by)
    ]


def test_every_flag_said_to_be_refused_is_in_a_rule_or_shown_by_its_case() -> None:
    """And none that is refused is said to work, unless some of its values do."""
    ruled = {name for refusal in REFUSALS for name in names(refusal.names)}
    said = {name for family in FAMILIES if family.outcome is Outcome.REFUSED for name in names(family.flags)}
    by_value = {"speculative_algorithm", "sampling_backend"}
    assert ruled - said == by_value
    by_case = {
        "speculative_dspark_sps_table_path",
        "speculative_dspark_confidence_sts_path",
        "speculative_use_block_verification",
    }
    assert said - ruled == by_case


def test_what_changes_nothing_is_given_to_the_server_that_shows_it() -> None:
    passed = {argument.partition("=")[0] for argument in given()}
    for family in FAMILIES:
        if family.outcome is Outcome.INERT:
            assert {options()[name] for name in names(family.flags)} <= passed, family.name
