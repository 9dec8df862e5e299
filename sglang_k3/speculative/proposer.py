"""From a draft model's block to drafted tokens: the Markov chain over the block's logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sglang_k3.models.dspark_draft import DSparkDraftModel


class Proposal(NamedTuple):
    """tokens [N, gamma] int64; distributions [N, gamma, V]: what each was drawn from, None if all are
    argmaxes. confidences [N, gamma]: chance of each to be accepted if those before it are; None if the draft
    has no head for it."""

    tokens: torch.Tensor
    distributions: torch.Tensor | None
    confidences: torch.Tensor | None

    def spread(self, drafted: torch.Tensor) -> Proposal:
        """The proposal of the requests where drafted [N] bool, with rows for the others, whose drafts are
        token 0 for certain, and of no chance."""
        n, gamma = len(drafted), self.tokens.shape[1]
        tokens = self.tokens.new_zeros(n, gamma)
        tokens[drafted] = self.tokens
        distributions, confidences = self.distributions, self.confidences
        if distributions is not None:
            whole = distributions.new_zeros(n, *distributions.shape[1:])
            whole[..., 0] = 1
            whole[drafted] = distributions
            distributions = whole
        if confidences is not None:
            whole = confidences.new_zeros(n, gamma)
            whole[drafted] = confidences
            confidences = whole
        return Proposal(tokens, distributions, confidences)


class Proposer:
    """Drafts for a batch of requests."""

    def __init__(self, model: DSparkDraftModel, pool: Any, generator: torch.Generator) -> None:
        self.model, self.pool, self.generator = model, pool, generator

    def propose(
        self,
        anchors: torch.Tensor,
        context_lens: torch.Tensor,
        token_table: torch.Tensor,
        request_rows: torch.Tensor,
        temperatures: torch.Tensor | None,
    ) -> Proposal:
        """anchors, context_lens, request_rows [N] int64 (see `DSparkDraftModel.draft`).

        temperatures [N, 1]: draw each draft at its request's temperature (0: the likeliest); None: all
        likeliest.
        """
        model = self.model
        hidden = model.draft(anchors, context_lens, token_table, request_rows, self.pool)
        base = model.base_logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        previous, tokens, drawn_from, befores = anchors, [], [], []
        for k in range(hidden.shape[1]):
            embedded = model.markov_head.embed(previous)
            logits = base[:, k] + model.markov_head(embedded)
            befores.append(embedded)
            likeliest = logits.argmax(-1)
            if temperatures is None:
                previous = likeliest
            else:
                # A request whose numbers broke drafts once more before it ends; nothing is drawn from NaN.
                greedy = (temperatures[:, 0] <= 0) | ~logits.isfinite().all(-1)
                probs = torch.softmax(logits.float() / temperatures.clamp(min=1e-5), -1)
                certain = torch.nn.functional.one_hot(likeliest, probs.shape[1]).to(probs.dtype)
                probs = torch.where(greedy.unsqueeze(1), certain, probs)
                drawn_from.append(probs)
                previous = torch.multinomial(probs, 1, generator=self.generator)[:, 0]
            tokens.append(previous)
        return Proposal(
            torch.stack(tokens, 1),
            torch.stack(drawn_from, 1) if drawn_from else None,
            self._confidences(hidden, torch.stack(befores, 1)),
        )

    def _confidences(self, hidden: torch.Tensor, befores: torch.Tensor) -> torch.Tensor | None:
        head = self.model.confidence_head
        if head is None:
            return None
        return head(hidden.flatten(0, 1), befores.flatten(0, 1)).view(hidden.shape[:2])
