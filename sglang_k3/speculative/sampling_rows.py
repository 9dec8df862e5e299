"""The target's sampler applied to drafted rows: each row gets its request's parameters and its own
position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")


def for_rows(info: SamplingBatchInfo, rows: int) -> SamplingBatchInfo:
    """The info of N requests for N * rows rows. What changes logits is applied before (see the worker)."""
    repeated = {
        name: None if (value := getattr(info, name)) is None else value.repeat_interleave(rows, 0)
        for name in _PER_REQUEST
    }
    return replace(
        info,
        **repeated,
        grammars=None,
        grammar_mask=None,
        penalizer_orchestrator=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        has_custom_logit_processor=False,
        custom_logit_processor=None,
        logit_bias=None,
        return_sampling_masks=None,
        return_sampling_support_logprobs=None,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
    )


def choose(
    sampler: Any, logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor
) -> torch.Tensor:
    """The plain sampler's token for each row: logits [T, V] (overwritten), info of T rows, positions [T]."""
    output = LogitsProcessorOutput(next_token_logits=logits)
    return sampler(output, info, False, [0] * len(logits), [None] * len(logits), positions).long()


def probabilities(logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> torch.Tensor:
    """[T, V] fp32: what the plain sampler draws from, after temperature, top-k, top-p and min-p."""
    probs = torch.softmax(logits.float() / info.temperatures, dim=-1)
    if not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling):
        return probs
    filtered = top_k_top_p_min_p_sampling_from_probs_torch(
        probs,
        info.top_ks,
        info.top_ps,
        info.min_ps,
        info.need_min_p_sampling,
        None,
        positions,
        return_filtered_probs=True,
    )
    weights, tokens = filtered[1], filtered[2]
    probs = torch.zeros_like(probs).scatter_(1, tokens.long(), weights.float())
    return probs / probs.sum(1, keepdim=True)
