"""A request whose logits are not finite numbers ends alone, and nothing that it computed is kept.

NaN in a state stays in it: every later token of the request has it too, and a cached state would hand it to
other requests. So the rows are looked at where the model makes them, before anything is sampled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
        if logits.device.type != "cpu":
            # A look would make the host wait for the whole forward.
            logits.masked_fill_(output.broken_rows.unsqueeze(1), 0.0)
        elif output.broken_rows.any():
            logits[output.broken_rows] = 0.0
    return output


def mark_broken(original: Callable[..., Any], scheduler: Any, batch: Any, *rest: Any, **named: Any) -> Any:
    """AROUND hook on the scheduler's forward pass: nothing of a broken request is stored from here on.

    With overlap the next pass is prepared before the results of this one are processed, and a chunk's state
    is in the tree by then.
    """
    result = original(scheduler, batch, *rest, **named)
    rows = getattr(getattr(result, "logits_output", None), "broken_rows", None)
    if rows is None or not batch.reqs:
        return result
    with _stream_of_the_pass(scheduler, rows.device):
        if rows.device.type != "cpu" and batch.forward_mode.is_decode():
            result.broken_note = _Note(rows.view(len(batch.reqs), -1).any(1), list(batch.reqs))
        elif bool(rows.any()):
            _mark(result, batch.reqs, rows.view(len(batch.reqs), -1).any(1).tolist())
    return result


def _stream_of_the_pass(scheduler: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Where the forward pass was launched: with overlap not on the scheduler's own stream."""
    if device.type == "cpu" or not scheduler.enable_overlap:
        return nullcontext()
    return torch.get_device_module(device).stream(scheduler.forward_stream)


def _mark(result: Any, reqs: list[Any], broken: list[bool]) -> None:
    result.broken_requests = [req for req, bad in zip(reqs, broken, strict=True) if bad]
    for req in result.broken_requests:
        req.is_broken = req.skip_radix_cache_insert = True


class _Note:
    """A decode step's finding on its way from the device; read where the step's results are waited for
    anyway, which is before anything of a finished request is cached."""

    def __init__(self, broken: torch.Tensor, reqs: list[Any]) -> None:
        self.reqs = reqs
        self.device = broken  # stays alive until it is copied
        self.host = torch.empty(len(reqs), dtype=torch.bool, pin_memory=True)
        self.host.copy_(broken, non_blocking=True)
        self.copied = torch.get_device_module(broken.device).Event()
        self.copied.record()

    def read(self) -> list[bool]:
        self.copied.synchronize()
        return self.host.tolist()


def end_broken(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    """AROUND hook on the processing of a pass' results: what broke in it ends with it, unless the pass
    before it was the request's last already."""
    note = getattr(result, "broken_note", None)
    if note is not None:
        _mark(result, note.reqs, note.read())
    for req in getattr(result, "broken_requests", ()):
        if not req.finished():
            _end(req)
    return original(scheduler, batch, result)


def is_broken(req: Any) -> bool:
    return getattr(req, "is_broken", False)


def _end(req: Any) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    message = (
        f"the logits behind token {len(req.origin_input_ids) + len(req.output_ids)} are not finite numbers: "
        "this request is ended and nothing of it is cached; others go on. A bfloat16 checkpoint may overflow "
        "where float32 does not (--dtype float32)"
    )
    logger.error("Request %s: %s.", req.rid, message)
    req.to_finish = FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, "NotFinite")
