"""Where an accepted run must end: at a stop token or at the request's last allowed token.

Plain decoding never computes behind a stop. Ending the run there too keeps the KDA state of a finished
request at the depth of its text, so the prefix cache can take it (without a separate buffer the live
state is what is cached, and it cannot be shortened afterwards).
"""

from __future__ import annotations

from typing import Any

import torch

_NO_TOKEN = -1


def stop_tokens(req: Any) -> set[int]:
    """The token ids that end a request, as SGLang's own finish check sees them."""
    if req.sampling_params.ignore_eos:
        return set()
    found = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        found |= {req.tokenizer.eos_token_id} | set(req.tokenizer.additional_stop_token_ids or ())
    return {token for token in found if token is not None}


class RunLimits:
    """The most tokens each request of a batch may still take from a run.

    What is asked of requests does not change while they run, so it is kept until other requests are asked
    for.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._of: tuple[tuple[str, int], ...] = ()
        self._stops = torch.empty(0, 0, dtype=torch.int64)
        self._last_depth = torch.empty(0, dtype=torch.int64)

    def of(self, reqs: list[Any], depths: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[N] int64, at least 1. depths [N]: committed tokens before the run; tokens [N, D]: the run."""
        ids = tuple((req.rid, len(req.origin_input_ids)) for req in reqs)
        if ids != self._of:
            self._ask(reqs)
            self._of = ids
        rows = tokens.shape[1]
        stops = (tokens.unsqueeze(2) == self._stops.unsqueeze(1)).any(2)
        until_stop = torch.where(stops.any(1), stops.long().argmax(1) + 1, rows)
        return torch.minimum(until_stop, self._last_depth - depths).clamp(min=1)

    def _ask(self, reqs: list[Any]) -> None:
        sets = [sorted(stop_tokens(req)) for req in reqs]
        width = max(map(len, sets), default=0)
        self._stops = torch.tensor(
            [ids + [_NO_TOKEN] * (width - len(ids)) for ids in sets], dtype=torch.int64, device=self._device
        ).view(len(reqs), width)
        # The last token of a text is never an input, so the state ends one token before it.
        self._last_depth = torch.tensor(
            [len(req.origin_input_ids) + req.sampling_params.max_new_tokens - 1 for req in reqs],
            dtype=torch.int64,
            device=self._device,
        )
