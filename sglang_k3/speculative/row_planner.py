"""One decode step's rows, in the mode that was asked for: all of them, or what a budget says.

The budget sits on rank 0, whose clock and estimates decide for every rank.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.ragged_verify import RaggedVerifyMode, read_ragged_verify_mode

from sglang_k3.models.config import K3Config
from sglang_k3.speculative.budget_report import BudgetMetrics, Spent, spent_on
from sglang_k3.speculative.proposer import Proposal
from sglang_k3.speculative.ragged_rows import RaggedRows
from sglang_k3.speculative.verify_budget import Decision, Experts, VerifyBudget

VARIABLE = "SGLANG_RAGGED_VERIFY_MODE"

_CHANCE_WITHOUT_HEAD = 0.7
"""Of a draft whose model says nothing about it; what is accepted corrects it, request by request."""


def budgeted() -> bool:
    """By SGLang's own variable: compact budgets rows; static, where it is unset, verifies all."""
    return read_ragged_verify_mode() is RaggedVerifyMode.COMPACT


class RowPlanner:
    """rows: D of a full verify."""

    def __init__(self, rows: int, text: K3Config, device: str) -> None:
        self.rows, self.device = rows, device
        experts = None if text.moe is None else Experts(text.moe.num_experts, text.moe.top_k)
        self.budget = VerifyBudget(rows, experts) if budgeted() else None
        self._running: list[Any] = []
        self._last_ids, self._last_done = set[str](), 0.0
        self.spent = Spent()
        self._metrics: BudgetMetrics | None = None
        parallel = get_parallel()
        self.leads, self._ranks = parallel.tp_rank == 0, parallel.tp_size

    @property
    def what(self) -> str:
        mode = read_ragged_verify_mode().value
        return f"{'all' if self.budget is None else 'by a budget'} verified ({VARIABLE}={mode})"

    def begin(self, reqs: list[Any], seq_lens: torch.Tensor, info: Any) -> Step:
        """reqs, seq_lens [N]: the batch's requests, and their committed tokens; info: how they sample."""
        if self.budget is None:
            return Step(self)
        self._running = reqs
        for req, top_k in zip(reqs, info.top_ks.tolist(), strict=True):
            self.budget.welcome(req.rid, greedy=top_k <= 1)
        return BudgetedStep(self, self.budget, reqs, int(seq_lens.sum()))

    def agree(self, values: list[int]) -> torch.Tensor:
        """Rank 0's values, [N] int64."""
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        return tensor if self._ranks == 1 else get_tp_group().broadcast(tensor, src=0)

    def note_done(self, ids: list[str], now: float) -> None:
        """These requests' step is over, at this time.perf_counter()."""
        self._last_ids, self._last_done = set(ids), now

    def note_rest(self, ids: list[str], now: float) -> None:
        """Their next one begins; where a new request is among them, a prefill lay between."""
        if self.budget is not None and self._last_ids.issuperset(ids):
            self.budget.observe_rest(len(ids), now - self._last_done)

    def forget(self, name: str) -> None:
        if self.budget is not None:
            self.budget.forget(name)

    def show(self, labels: Mapping[str, str] | None) -> None:
        """To Prometheus under these labels; None: to nobody."""
        if self.budget is None or labels is None or not self.leads:
            return
        if self._metrics is None:
            self._metrics = BudgetMetrics(labels)
        self._metrics.show(self.spent, self.budget.paused([req.rid for req in self._running]))

    def summary(self) -> str | None:
        """For the scheduler's line about a decode batch."""
        if self.budget is None or not self.leads:
            return None
        accounts = [spent_on(req) for req in self._running]
        rows, steps = sum(each.rows for each in accounts), sum(each.steps for each in accounts)
        paused = self.budget.paused([req.rid for req in self._running])
        return f"verify rows: {rows / max(1, steps):.2f}, paused: {paused}/{len(accounts)}"


class Step:
    """A step on its way, every row of it verified: `drafting`, then `drafted`, then `done`."""

    drafting: torch.Tensor | None = None
    """[N] bool: for whom a draft is computed; None: for all."""

    def __init__(self, planner: RowPlanner) -> None:
        self._planner = planner

    def drafted(self, proposal: Proposal) -> RaggedRows:
        """The rows to verify of what was drafted."""
        counts = torch.full((len(proposal.tokens),), self._planner.rows, device=self._planner.device)
        return RaggedRows(counts, self._planner.rows, None)

    def done(self, counts: torch.Tensor) -> None:
        """counts [N]: tokens accepted of each request."""


class BudgetedStep(Step):
    """Its times are those of a device that is done when a call returns: a CPU's."""

    def __init__(self, planner: RowPlanner, budget: VerifyBudget, reqs: list[Any], context: int) -> None:
        super().__init__(planner)
        self._reqs = reqs
        self._ids = ids = [req.rid for req in reqs]
        self._budget, self._context = budget, context
        self._decision: Decision | None = None
        self._began = time.perf_counter()
        planner.note_rest(ids, self._began)
        who = budget.who_drafts(ids) if planner.leads else [False] * len(ids)
        self._who = planner.agree([int(drafts) for drafts in who]) > 0
        if not bool(self._who.all()):
            self.drafting = self._who

    def drafted(self, proposal: Proposal) -> RaggedRows:
        counts = [1] * len(self._ids)
        if self._planner.leads:
            chances = proposal.confidences
            if chances is None:
                known = np.full(proposal.tokens.shape, _CHANCE_WITHOUT_HEAD)
            else:
                known = chances.double().cpu().numpy()
            self._decision = self._budget.decide(self._ids, self._who.tolist(), known, self._context)
            counts = self._decision.rows
        rows = RaggedRows.of(self._planner.agree(counts))
        self._drafted = time.perf_counter()
        return rows

    def done(self, counts: torch.Tensor) -> None:
        if self._decision is None:
            return
        now = time.perf_counter()
        self._planner.note_done(self._ids, now)
        self._budget.observe(
            self._ids,
            self._decision,
            counts.tolist(),
            self._context,
            int(self._who.sum()),
            self._drafted - self._began,
            now - self._drafted,
        )
        for req, rows, drafted in zip(self._reqs, self._decision.rows, self._who.tolist(), strict=True):
            for account in (self._planner.spent, spent_on(req)):
                account.step(rows, drafted)
