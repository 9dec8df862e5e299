"""What prefill costs on this server, measured once at start by prefills of made-up prompts."""

from __future__ import annotations

import logging
import time
from array import array
from typing import Any

import numpy as np
import torch

from sglang_k3.prefix_cache.eviction import UNMEASURED, PrefillCost

logger = logging.getLogger(__name__)

_SHORT, _LONG, _BEHIND = 32, 256, 64
_REPEATS = 2


def measure(runner: Any, group: Any) -> PrefillCost:
    """runner: SGLang's model runner, its pools still empty. group: the CPU group of the ranks that have to
    agree; None for a single one.

    Times a short prompt, a long one, and a piece behind the long one, and solves for a fixed part, a part a
    token and a part a token and token looked back at.
    """
    if runner.token_to_kv_pool_allocator.size < 2 * _LONG:
        logger.info("The KV cache is too small to measure prefill in: every token counts the same.")
        return UNMEASURED
    shapes = ((_SHORT, 0), (_LONG, 0), (_BEHIND, _LONG))
    _prefill(runner, _SHORT, 0)
    seconds = [min(_prefill(runner, *shape) for _ in range(_REPEATS)) for shape in shapes]
    terms = [[1.0, new, new * (behind + new / 2)] for new, behind in shapes]
    _, per_token, per_pair = np.linalg.solve(np.array(terms), np.array(seconds))
    # Of a tiny model the parts are within the noise of the times.
    per_token = max(per_token, 1e-3 * seconds[1] / _LONG)
    found = torch.tensor([per_token, max(0.0, per_pair)], dtype=torch.float64)
    if group is not None and torch.distributed.get_world_size(group) > 1:
        torch.distributed.broadcast(found, torch.distributed.get_global_rank(group, 0), group=group)
    cost = PrefillCost(*found.tolist())
    logger.info(
        "Prefill costs %.3g ms a thousand tokens and %.3g ms more for each thousand in front of them; "
        "KDA states are kept by what they save of it.",
        1e6 * cost.per_token,
        1e9 * cost.per_pair,
    )
    return cost


def _prefill(runner: Any, new: int, behind: int) -> float:
    """Seconds to compute `new` tokens behind `behind` that are there already. Leaves the pools empty."""
    from sglang.benchmark import one_batch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    ids = array("q", [(7 * place + 1) % runner.model_config.vocab_size for place in range(behind + new)])
    request = Req(
        rid="prefill cost",
        origin_input_text="",
        origin_input_ids=ids,
        sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
    )
    request.full_untruncated_fill_ids = ids
    request.logprob_start_len = -1
    try:
        if behind:
            request.extend_end = behind
            one_batch.extend([request], runner)
            request.prefix_len = behind
        request.extend_end = behind + new
        began = time.perf_counter()
        one_batch.extend([request], runner)
        return time.perf_counter() - began
    finally:
        runner.req_to_token_pool.clear()
        runner.token_to_kv_pool_allocator.clear()
