"""Parts of a step's time, by hand; and the published figures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sglang_k3.models.presets import real_k3_config
from sglang_k3.planning.published import CALIBRATION, figures
from sglang_k3.planning.roofline import (
    CACHE,
    COMMUNICATION,
    DRAFT,
    EXPERTS,
    LAUNCHES,
    STATE,
    distinct_experts,
    state_passes,
    step,
    tail_rows,
)
from sglang_k3.speculative.record_forms import FORMS
from tests.planning.plans import planned


@pytest.mark.parametrize("rows, share", [(1, 16 / 896), (32, 0.438), (256, 0.990)])
def test_distinct_experts_of_so_many_rows(rows: int, share: float) -> None:
    assert distinct_experts(896, 16, rows) / 896 == pytest.approx(share, abs=1e-3)


@pytest.mark.parametrize(
    "form, passes, tail",
    [
        (None, 2, 0),
        ("plain", 3, 4),
        ("folded", 2, 4),
        # 32 rows: tails of 4, 8, 12, 16, and behind a tail of 20 the verify writes.
        ("ring", 1 + 1 / 5, 12),
        ("anchored", 1 + 2 * 4 / 64, 31.5),
    ],
)
def test_a_state_is_read_and_written_as_its_form_says(form: str | None, passes: float, tail: float) -> None:
    chosen = None if form is None else FORMS[form]
    assert state_passes(chosen, 8, 4.0) == pytest.approx(passes)
    assert tail_rows(chosen, 8, 4.0) == pytest.approx(tail)


def test_parts_of_a_plain_step_are_bytes_over_bandwidth() -> None:
    found = planned("950dt", 4, bandwidth=1000.0, tflops=1e6, launch_us=2.0, tp=4, context=10_000)
    seconds = found.step.seconds
    distinct = 896 * (1 - (1 - 16 / 896) ** 4)
    assert seconds[EXPERTS] == pytest.approx(92 * distinct * 17_547_264 / 4 / 1e12)
    assert seconds[STATE] == pytest.approx(2 * 4 * 449_372_160 / 4 / 1e12)
    assert seconds[CACHE] == pytest.approx(4 * 10_000 * 27_648 / 1e12)
    assert seconds[DRAFT] == 0
    assert seconds[LAUNCHES] == pytest.approx((69 * 10 + 24 * 17 + 93 * 14) * 2e-6)


def test_many_rows_are_bound_by_products() -> None:
    found = planned("950dt", 8192, tflops=100.0, tp=8, ep=8, context=100)
    products = 2 * 8192 * 16 * 33_030_144 / 8 * 92
    assert found.step.seconds[EXPERTS] == pytest.approx(products / 100e12)


def test_one_rank_talks_to_nobody() -> None:
    assert planned(tp=1, concurrency=1).step.seconds[COMMUNICATION] == 0
    assert planned(tp=2, concurrency=1).step.seconds[COMMUNICATION] > 0


def test_speculation_divides_a_longer_step_by_what_it_yields() -> None:
    plain = planned(tp=16, concurrency=8).step
    drafted = planned(tp=16, concurrency=8, draft="kimi-k3", accept_length=4.0).step
    assert (plain.rows, plain.tokens, drafted.rows, drafted.tokens) == (8, 1.0, 64, 4.0)
    assert plain.total < drafted.total
    assert drafted.tpot == drafted.total / 4


def test_published_steps_are_no_shorter_than_the_planners() -> None:
    found = figures()
    assert found["950dt-32"].published_step == pytest.approx(41.2e-3)
    assert found["950dt-32"].own.distinct == pytest.approx(0.990 * 896, rel=1e-3)
    for figure in found.values():
        assert figure.unattributed > 0, figure.key
    # The run that fixed costs were chosen on.
    assert found["b300-c1"].unattributed < 0.1 * found["b300-c1"].published_step


def test_what_cannot_be_attributed_is_carried_over_by_the_layer() -> None:
    figure = figures()[CALIBRATION["950dt"]]
    found = planned("950dt", 1, tp=16)
    assert found.unattributed == ("950dt-32", figure.unattributed)
    assert planned("cpu", 1).unattributed is None
    layers = real_k3_config()["text_config"]["num_hidden_layers"]
    assert layers == figure.deployment.config.num_layers


def test_a_published_run_planned_again_gives_its_own_step() -> None:
    figure = figures()["950dt-32"]
    again = step(replace(figure.deployment, name="other"), 32, 102400)
    assert again == figure.own
    assert math.isclose(again.tpot, again.total / 4)
