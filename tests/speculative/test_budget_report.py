"""What a budget spent, counted by request and shown to Prometheus."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client import REGISTRY

from sglang_k3.speculative.budget_report import BudgetMetrics, Spent, spent_on


def test_a_request_keeps_its_account() -> None:
    one, other = SimpleNamespace(), SimpleNamespace()
    spent_on(one).step(8, True)
    spent_on(one).step(1, False)
    assert spent_on(one) == Spent(steps=2, rows=9, paused_steps=1)
    assert spent_on(other) == Spent()


def test_counters_follow_what_was_spent() -> None:
    labels = {"model_name": "tiny"}
    metrics, spent = BudgetMetrics(labels), Spent()
    for rows, drafted, paused in ((8, True, 0), (1, False, 2), (3, True, 1)):
        spent.step(rows, drafted)
        metrics.show(spent, paused)

    def read(name: str) -> float | None:
        return REGISTRY.get_sample_value(f"sglang_k3:verify_{name}", labels)

    assert [read(f"{name}_total") for name in ("steps", "rows", "paused_steps")] == [3, 12, 1]
    assert read("paused_requests") == 1
