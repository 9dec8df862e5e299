"""The margin rule: outside exact mode a mismatch counts only where the oracle was sure.

Two implementations round differently, and where the oracle's best two candidates lie closer than
rounding reaches, either answer is right. A token (or a router's choice) is compared only where the
oracle's gap exceeds MARGIN; once a sequence took the other branch of a near-tie its later tokens have
another history and are no longer compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_k3.models.reference import ReferenceModel, Trace, top2_gap

MARGIN = 1e-3


@dataclass(frozen=True)
class Verdict:
    """Positions compared, excused near-ties, and wrong tokens as (position, expected, got)."""

    compared: int
    excused: int
    wrong: tuple[tuple[int, int, int], ...]
    largest_logprob_error: float


def check(
    oracle: ReferenceModel,
    prompt: Sequence[int],
    output: Sequence[int],
    logprobs: Sequence[float],
    margin: float = MARGIN,
) -> Verdict:
    """Greedy `output` after `prompt`, and the logprob it was given, against the oracle's own logits."""
    trace = Trace()
    logits = oracle.forward([*prompt, *output[:-1]], trace=trace)[len(prompt) - 1 :].double()
    gaps = top2_gap(logits)
    # A near-tie in a router can send a token through another expert: its logits are then off by more
    # than rounding, and so are those behind it.
    router = torch.stack([gap for gap in trace.expert_gaps.values()]).amin(0).double()
    steady = router.cummin(0).values[len(prompt) - 1 :] > ROUTER_MARGIN
    expected = logits.argmax(-1).tolist()
    given = torch.log_softmax(logits, -1)
    compared = excused = 0
    wrong: list[tuple[int, int, int]] = []
    error = 0.0
    for position, token in enumerate(output):
        if not bool(steady[position]):
            excused += len(output) - position
            break
        if float(gaps[position]) <= margin and token != expected[position]:
            excused += len(output) - position
            break
        compared += 1
        error = max(error, abs(float(given[position, token]) - logprobs[position]))
        if token != expected[position]:
            wrong.append((position, expected[position], token))
            break
    return Verdict(compared, excused, tuple(wrong), error)


ROUTER_MARGIN = 1e-6
