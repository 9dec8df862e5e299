"""What the verify budget decided, told: in each answer's meta_info and to Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from sglang_k3.prefix_cache.reporting import OutcomeStreamer

KEY = "verify_budget"


@dataclass
class Spent:
    """Of one request, or of all: verify steps, rows verified in them, and those steps among them for which no
    draft was computed because drafts did not pay."""

    steps: int = 0
    rows: int = 0
    paused_steps: int = 0

    def step(self, rows: int, drafted: bool) -> None:
        self.steps += 1
        self.rows += rows
        self.paused_steps += not drafted


class BudgetStreamer(OutcomeStreamer):
    """Adds to a finished request's meta_info a list of one: what was spent on it."""

    __slots__ = ()
    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list]:
        return {KEY: [[asdict(spent_on(req))] if req.finished() else [] for req in reqs]}

    def is_request_level_customized_info_key(self, key: str) -> bool:
        return key == KEY


def spent_on(req: Any) -> Spent:
    """The request's account, which is opened with its first verify."""
    if not hasattr(req, KEY):
        setattr(req, KEY, Spent())
    return getattr(req, KEY)


class BudgetMetrics:
    """labels: Prometheus labels of this process."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        # The client looks at its environment when it is imported; SGLang has set that by now.
        from prometheus_client import Counter, Gauge

        names = tuple(labels)
        counters = {
            "steps": "Verify steps of requests.",
            "rows": "Drafted rows verified, each step's own token included.",
            "paused_steps": "Verify steps of requests whose drafts do not pay, without a draft.",
        }
        self._counters = {
            name: Counter(f"sglang_k3:verify_{name}", what, names).labels(**labels)
            for name, what in counters.items()
        }
        self._paused = Gauge(
            "sglang_k3:verify_paused_requests",
            "Running requests whose drafts do not pay.",
            names,
            multiprocess_mode="mostrecent",
        ).labels(**labels)
        self._shown = Spent()

    def show(self, spent: Spent, paused: int) -> None:
        """spent: by all requests since the start. paused: requests now."""
        for name, counter in self._counters.items():
            counter.inc(getattr(spent, name) - getattr(self._shown, name))
        self._shown = replace(spent)
        self._paused.set(paused)


def show_budget(scheduler: Any) -> None:
    """Bring the counters up to date; without metrics, or without a budget, it costs nothing."""
    from sglang_k3.speculative.dspark_worker import K3DSparkWorker

    worker = scheduler.draft_worker
    if isinstance(worker, K3DSparkWorker):
        collector = getattr(scheduler.tree_cache, "metrics_collector", None)
        worker.show_budget(None if collector is None else collector.labels)


def output_streamer_class(chosen: type, scheduler: Any) -> type:
    """The class that builds answers, `chosen` where no budget decides."""
    from sglang_k3.speculative.row_planner import budgeted

    return BudgetStreamer if budgeted() and not scheduler.spec_algorithm.is_none() else chosen
