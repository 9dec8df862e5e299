"""Which drafted tokens stay: pure functions on tensors, none of which the host reads.

Two rules, both with the target's own law:

* `accept_equal`: each row's next token is chosen by the server's plain sampler; drafts stay while they are
  that very token. With the sampler's (seed, position) noise the text is the plain server's, token for
  token; greedy is the same rule with an argmax.
* `accept_by_rejection` for sampled requests without a seed, whose drafts were drawn from a distribution of
  their own (arXiv 2211.17192): likelier to keep them, equal in law, not in noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sglang_k3.kernels.acceptance import reference


class Accepted(NamedTuple):
    """counts [N] int64: tokens committed, 1..D (accepted drafts and one more); tokens [N, D]: the new tokens,
    the first counts[n] of them valid; the last valid one is the next anchor."""

    counts: torch.Tensor
    tokens: torch.Tensor

    @property
    def anchors(self) -> torch.Tensor:
        """[N]: the last valid token of each request."""
        return self.tokens.gather(1, self.counts.unsqueeze(1) - 1).squeeze(1)

    def limited(self, limits: torch.Tensor) -> Accepted:
        """No more than limits [N] (>= 1) tokens."""
        return Accepted(torch.minimum(self.counts, limits), self.tokens)


def accept_equal(
    candidates: torch.Tensor,
    chosen: torch.Tensor,
    chain: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = reference.chain,
) -> Accepted:
    """candidates [N, D]: anchor and drafts; chosen [N, D]: what the target's sampler chose behind each of
    them; chain: the operator `acceptance.chain`."""
    return Accepted(chain(candidates, chosen), chosen)


def accept_by_rejection(
    candidates: torch.Tensor, target: torch.Tensor, draft: torch.Tensor, generator: torch.Generator
) -> Accepted:
    """Rejection sampling of a chain of drafts.

    candidates [N, D] int64; target [N, D, V]: the target's probabilities behind each candidate, as
    filtered by the request's top-k, top-p and min-p; draft [N, D - 1, V]: the distribution each draft was
    drawn from. A draft d stays while u * draft(d) < target(d); the first one that does not is replaced by
    a draw from the normalised positive part of target - draft, and behind a full chain comes a draw from
    target.
    """
    drafted = candidates[:, 1:].unsqueeze(2)
    uniform = torch.rand(drafted.shape[:2], generator=generator, dtype=target.dtype, device=target.device)
    likely = target[:, :-1].gather(2, drafted).squeeze(2)
    keeps = uniform * draft.gather(2, drafted).squeeze(2) < likely
    accepted = keeps.long().cumprod(1).sum(1)
    nothing = torch.zeros_like(target[:, :1])
    rest = (target - torch.cat([draft, nothing], 1)).clamp(min=0)
    at = accepted.view(-1, 1, 1).expand(-1, 1, target.shape[2])
    weights, fallback = rest.gather(1, at).squeeze(1), target.gather(1, at).squeeze(1)
    # Equal distributions leave no rest, and rounding may still have rejected.
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, fallback)
    bonus = torch.multinomial(weights, 1, generator=generator)
    tokens = torch.cat([candidates[:, 1:], bonus], 1).scatter(1, accepted.unsqueeze(1), bonus)
    return Accepted(accepted + 1, tokens)


def choose_rows(mask: torch.Tensor, yes: Accepted, no: Accepted) -> Accepted:
    """Request by request: `yes` where mask [N] bool."""
    return Accepted(
        torch.where(mask, yes.counts, no.counts), torch.where(mask.unsqueeze(1), yes.tokens, no.tokens)
    )
