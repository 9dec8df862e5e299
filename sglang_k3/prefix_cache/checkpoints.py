"""Where a prefill chunk keeps the state that the prefix cache will hand out."""

from __future__ import annotations

from typing import Any


def prefill_checkpoint(original, batch, req) -> Any:
    """AROUND hook on the scheduler's choice of the depth to keep a state at, for one prefill chunk.

    SGLang picks a depth that is a whole number of state chunks behind the start of the prefill chunk, and
    the radix tree then cuts the key to whole pages. Where the chunk starts off a page (mixed batches fill
    the token budget to the last token) the key is shorter than the state, and a later hit would start
    from a state that has already seen tokens it is about to compute. So the depth is cut to a page first.
    Our kernels can keep a state at any depth, so the entry names that depth itself
    (`BatchMetadata` reads it), not SGLang's code for a multiple of its kernel's chunk.
    """
    from sglang_k3.upstream import ARCHITECTURES

    entry = original(batch, req)
    architectures = batch.model_config.hf_config.architectures or [""]
    if architectures[0] not in ARCHITECTURES or not entry.track_mask:
        return entry
    depth = req.kv.mamba_last_track_seqlen
    depth -= depth % batch.tree_cache.page_size
    req.kv.mamba_last_track_seqlen = depth
    return entry._replace(track_seqlen=depth)
