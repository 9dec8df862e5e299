"""A request whose logits are not finite numbers ends alone, and nothing that it computed is kept.

NaN in a state stays in it: every later token of the request has it too, and a cached state would hand it to
other requests. So the rows are looked at where the model makes them, before anything is sampled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import torch

logger = logging.getLogger(__name__)


def guard(output: Any) -> Any:
    """Note the rows of next_token_logits [rows, V] that hold NaN or +Inf in output.broken_rows [rows] bool,
    and zero them, because sampling from them ends the scheduler. Returns the output."""
    logits = output.next_token_logits
    if logits is not None and logits.is_floating_point():
        # NaN is not smaller than anything. -Inf stands for a forbidden token.
        output.broken_rows = ~(logits <= torch.finfo(logits.dtype).max).all(-1)
        if output.broken_rows.any():
            logits[output.broken_rows] = 0.0
    return output


def end_broken(original: Callable[..., Any], scheduler: Any, batch: Any, *rest: Any, **named: Any) -> Any:
    """AROUND hook on the scheduler's forward pass.

    Not on the processing of its results: with overlap the next pass is prepared before that, and a chunk's
    state is in the tree by then.
    """
    result = original(scheduler, batch, *rest, **named)
    rows = getattr(getattr(result, "logits_output", None), "broken_rows", None)
    if rows is not None and batch.reqs and bool(rows.any()):
        broken = rows.view(len(batch.reqs), -1).any(1).tolist()
        for req in (req for req, is_broken in zip(batch.reqs, broken, strict=True) if is_broken):
            _end(req)
    return result


def is_broken(req: Any) -> bool:
    return getattr(req, "is_broken", False)


def _end(req: Any) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if req.finished() or is_broken(req):
        return
    message = (
        f"the logits behind token {len(req.origin_input_ids) + len(req.output_ids)} are not finite numbers: "
        "this request is ended and nothing of it is cached; others go on. A bfloat16 checkpoint may overflow "
        "where float32 does not (--dtype float32)"
    )
    logger.error("Request %s: %s.", req.rid, message)
    req.is_broken = True
    req.skip_radix_cache_insert = True
    req.to_finish = FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, "NotFinite")
