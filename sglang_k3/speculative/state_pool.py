"""SGLang's state pool with banks of replay records, and what they take of the memory that is planned."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MambaPool

from sglang_k3.speculative.record_forms import chosen
from sglang_k3.speculative.replay_records import ReplayRecords, bank_bytes, fields_of, window_rows_of

logger = logging.getLogger(__name__)

_GIB = 1 << 30

ANCHORED_SLOTS = 2
"""Slots that a request needs in the anchored form: its own, and while its prompt is computed the one that
takes the prompt's checkpoint. Later it is the one that the next boundary's state is written to."""


class RecordingStatePool(MambaPool):
    """SGLang's state pool with banks of records instead of its scratch of one state per drafted token."""

    records: ReplayRecords

    def __init__(self, *, speculative_num_draft_tokens: int, spec_state_size: int, **pool: Any) -> None:
        # Told of no drafts, SGLang allocates neither the scratch nor wider windows.
        super().__init__(spec_state_size=spec_state_size, speculative_num_draft_tokens=None, **pool)
        from sglang.srt.runtime_context import get_exec

        params = pool["cache_params"]
        self.records = _records_class(pool["device"])(
            fields_of(params),
            layers=len(pool["mamba_layer_ids"]),
            requests=spec_state_size,
            rows=speculative_num_draft_tokens,
            form=chosen(),
            window_rows=window_rows_of(params),
            device=pool["device"],
            exact=bool(get_exec().deterministic.enable_deterministic_inference),
        )
        logger.info(
            "replay records: %s (%s), %d requests x %d rows, %.1f MB (%d bytes a row and layer; a state has "
            "%d)",
            self.records.form.name,
            self.records.form.what,
            spec_state_size,
            self.records.ring,
            self.records.bytes / 1e6,
            sum(field.bytes for field in fields_of(params)),
            self.mamba_cache.temporal[0, 0].nbytes,
        )

    # Whoever copies a state reads it, and whoever writes a slot ends what went on from its old state.

    def copy_from(self, src_indices: torch.Tensor, dst_indices: torch.Tensor) -> None:
        self.records.settle_slots(self, src_indices)
        self.records.forget_slots(dst_indices)
        super().copy_from(src_indices, dst_indices)

    def clear_slots(self, indices: torch.Tensor) -> None:
        self.records.forget_slots(indices)
        super().clear_slots(indices)


def _records_class(device: str) -> type[ReplayRecords]:
    """Records whose checks look at once, or on a device that nobody may wait for, later."""
    if torch.device(device).type == "cpu":
        return ReplayRecords
    from sglang_k3.attention_backends.ascend_records import DeviceRecords

    return DeviceRecords


def records_of(req_pool: Any) -> ReplayRecords | None:
    """The banks of a server that speculates, from its request pool; None for one that does not."""
    return getattr(req_pool.mamba_pool, "records", None)


def build_pool(original, req_pool, *, cache_params, speculative_num_draft_tokens=None, **rest) -> Any:
    """AROUND hook on HybridReqToTokenPool._init_mamba_pool: our pool for our models when drafts are
    verified."""
    from sglang_k3.models.hf_config import K3CacheParams

    if speculative_num_draft_tokens and isinstance(cache_params, K3CacheParams):
        req_pool.mamba_pool_cls = RecordingStatePool
    return original(
        req_pool,
        cache_params=cache_params,
        speculative_num_draft_tokens=speculative_num_draft_tokens,
        **rest,
    )


def plan_memory(original, planner, total_rest_memory: float) -> float:
    """AROUND hook on the memory planner's sizing of the state pool (GiB in, GiB left out).

    SGLang would reserve a whole state for every drafted token. Ours charges the banks, which is what is
    allocated, and lets SGLang size the slots as without speculation.
    """
    from sglang.srt.runtime_context import get_schedule, get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_k3.models.hf_config import K3CacheParams

    params = planner.mambaish_config.mamba2_cache_params
    algorithm = planner.spec_algorithm
    if algorithm.is_none() or not isinstance(params, K3CacheParams):
        return original(planner, total_rest_memory)
    requests = max(1, get_schedule().max_running_requests // planner.attn_dp_size)
    slots = get_schedule().max_mamba_cache_size
    if slots is not None:
        requests = min(requests, slots // planner._calculate_mamba_ratio())
    size, each = bank_bytes(params, get_spec().speculative_num_draft_tokens, chosen(), requests)
    banks = size / _GIB
    logger.info("planned %.3f GiB of replay records: %d requests x %.1f MB", banks, requests, each / 1e6)
    planner.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        return original(planner, total_rest_memory - banks)
    finally:
        planner.spec_algorithm = algorithm


def slots_of_a_request(original, planner) -> int:
    """AROUND hook on the planner's count of state slots for each running request."""
    from sglang.srt.runtime_context import get_memory

    from sglang_k3.models.hf_config import K3CacheParams

    params = planner.mambaish_config.mamba2_cache_params
    speculates = not planner.spec_algorithm.is_none()
    if speculates and isinstance(params, K3CacheParams) and chosen().anchored:
        return 1 if get_memory().disable_radix_cache else ANCHORED_SLOTS
    return original(planner)
