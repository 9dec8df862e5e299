"""What a request that is taken back into the queue leaves behind: its last checkpoint, like one that ended.

SGLang frees a retracted request's tokens and states at once, so that it begins again at its prompt's end.
Handed to the tree they are as free as any cached prefix, the last to go, and the request goes on from its
last boundary if they are still there.
"""

from __future__ import annotations

from typing import Any

from sglang_k3.broken_requests import is_broken
from sglang_k3.prefix_cache.admission import states_of


def release(original, req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
    """AROUND hook on `release_kv_cache` as retraction calls it: of a request that runs."""
    if checkpoint or not _leaves_a_checkpoint(req, tree_cache):
        original(req, tree_cache, checkpoint=checkpoint)
        return
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    # The tree takes over states of requests that have ended; to it, this one has.
    req.finished_reason = FINISH_ABORT("retracted")
    try:
        original(req, tree_cache, checkpoint=True)
    finally:
        req.finished_reason = None


def _leaves_a_checkpoint(req: Any, tree_cache: Any) -> bool:
    if states_of(tree_cache) is None or tree_cache.disable or not req.kv.holds_kv:
        return False
    # A session keeps its turns in a record of its own.
    return req.session is None and not req.finished() and not is_broken(req)
