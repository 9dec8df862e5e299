"""Penalties on drafted rows: row i is penalised for the drafts before it, as if they had been generated.

SGLang's penalisers keep running sums for a batch; one orchestrator for each penalised request is advanced
here draft by draft, and of its states after each draft the one after the accepted ones is kept. SGLang's
own speculative path applies one penalty to all rows and never counts what was generated.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.sampling import penaltylib

_PENALIZERS = {
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
}
_RUNNING_SUMS = (
    "cumulated_frequency_penalties",
    "cumulated_presence_penalties",
    "cumulated_repetition_penalties",
    "len_output_tokens",
)


class _Batch(SimpleNamespace):
    """The part of a batch that an orchestrator looks at: reqs and device."""


class _Request:
    """One request's orchestrator and its running sums."""

    def __init__(self, req: Any, vocab_size: int, device: str) -> None:
        self.batch: Any = _Batch(reqs=[req], device=device)  # the orchestrator keeps a weak reference alone
        self.orchestrator = penaltylib.BatchedPenalizerOrchestrator(vocab_size, self.batch, _PENALIZERS)

    def cumulate(self, token: torch.Tensor) -> None:
        self.orchestrator.cumulate_output_tokens(token.view(1))

    def _holders(self) -> list[tuple[Any, str]]:
        return [
            (penalizer, name)
            for penalizer in self.orchestrator.penalizers.values()
            for name in _RUNNING_SUMS
            if hasattr(penalizer, name)
        ]

    def save(self) -> list[torch.Tensor]:
        return [getattr(holder, name).clone() for holder, name in self._holders()]

    def restore(self, sums: list[torch.Tensor]) -> None:
        for (holder, name), value in zip(self._holders(), sums, strict=True):
            setattr(holder, name, value)


class RowPenalties:
    """Of all running requests, by their id."""

    def __init__(self, vocab_size: int, device: str) -> None:
        self.vocab_size, self.device = vocab_size, device
        self._requests: dict[str, _Request] = {}
        self._after_drafts: dict[str, list[list[torch.Tensor]]] = {}

    def begin(self, reqs: list[Any], first_tokens: torch.Tensor) -> None:
        """After a prefill (or a resumption, whose output so far is in req.output_ids): the first token is
        out."""
        for n, req in enumerate(reqs):
            self.forget(req.rid)
            request = _Request(req, self.vocab_size, self.device)
            if not request.orchestrator.is_required:
                continue
            for token in req.output_ids:
                request.cumulate(torch.tensor(token, device=self.device))
            request.cumulate(first_tokens[n])
            self._requests[req.rid] = request

    def apply(self, reqs: list[Any], logits: torch.Tensor, candidates: torch.Tensor) -> None:
        """logits [N, D, V], in place; candidates [N, D]: anchor (counted already) and drafts."""
        self._after_drafts.clear()
        for n, req in enumerate(reqs):
            request = self._requests.get(req.rid)
            if request is None:
                continue
            states = []
            for row in range(candidates.shape[1]):
                if row:
                    request.cumulate(candidates[n, row])
                request.orchestrator.apply(logits[n, row].unsqueeze(0))
                states.append(request.save())
            self._after_drafts[req.rid] = states

    def accept(self, reqs: list[Any], counts: torch.Tensor, anchors: torch.Tensor) -> None:
        """counts [N]: tokens committed; anchors [N]: the last of them, which no row has seen yet."""
        for n, req in enumerate(reqs):
            states = self._after_drafts.pop(req.rid, None)
            if states is None:
                continue
            request, accepted = self._requests[req.rid], counts[n] - 1
            request.restore([torch.stack(sums)[accepted] for sums in zip(*states, strict=True)])
            request.cumulate(anchors[n])

    def forget(self, rid: str) -> None:
        self._requests.pop(rid, None)
        self._after_drafts.pop(rid, None)
