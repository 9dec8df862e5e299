"""Plans against what a CPU server's scheduler really allocates, for two forms of records."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inside import run_cases


@pytest.mark.parametrize(
    "strategy, form", [("extra_buffer", "folded"), ("extra_buffer_lazy", "anchored"), ("no_buffer", "plain")]
)
def test_a_server_started_with_the_printed_flags_allocates_the_plan(strategy: str, form: str) -> None:
    settings = {"K3_STRATEGY": strategy, "SGLANG_K3_RECORDS": form}
    run_cases(Path(__file__).parent / "inside", settings)
