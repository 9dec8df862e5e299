"""Banks of replay records: what verify leaves behind instead of states, and the commit that replays it.

A bank row belongs to a running request (its row in req_to_token), never to a cached slot, so a checkpoint
in the prefix cache costs nothing here. No tensor has a draft dimension beside a state's [V, K]. Each bank
row remembers how deep the state was when its records were written; a commit that expects another depth is
refused, because replaying a late or foreign record would leave a state that no prompt has.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MambaPool

from sglang_k3.kernels.kda.record import Field, record_row
from sglang_k3.kernels.registry import Call, choose
from sglang_k3.models.runtime import compute_dtype

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_NOTHING = -1


class StaleRecords(RuntimeError):
    """A commit met records of another step. The state was left as it was."""


@dataclass(frozen=True)
class LayerBank:
    """One layer's banks: u [R, D, H, V], k and g [R, D, H, K], x [R, D, C]."""

    u: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    x: torch.Tensor


def fields_of(cache_params: Any) -> tuple[Field, ...]:
    """The record row of a model, from the state shapes that SGLang's pools are built from."""
    heads, value_dim, key_dim = cache_params.shape.temporal
    ((_, channels),) = cache_params.shape.conv
    window = cache_params.dtype.conv
    return record_row(
        heads=heads,
        value_dim=value_dim,
        key_dim=key_dim,
        channels=channels,
        activation=compute_dtype(window),
        window=window,
    )


def bytes_per_request(cache_params: Any, rows: int) -> int:
    """Bytes of one running request's banks over all KDA layers of this rank, `rows` drafted rows each."""
    return len(cache_params.layers) * rows * sum(field.bytes for field in fields_of(cache_params))


class ReplayRecords:
    """Banks for `requests` running requests (and row 0, which is padding), `rows` drafted rows, `layers`."""

    def __init__(
        self, fields: tuple[Field, ...], *, layers: int, requests: int, rows: int, device: str, exact: bool
    ) -> None:
        self.rows = rows
        self.u, self.k, self.g, self.x = (
            torch.zeros(layers, requests + 1, rows, *field.shape, dtype=field.dtype, device=device)
            for field in fields
        )
        self.depth = torch.full((requests + 1,), _NOTHING, dtype=torch.int64, device=device)
        call = Call(torch.device(device).type, self.k.dtype, exact)
        self._commit_states = choose("kda.commit", call)
        self._commit_windows = choose("short_conv.commit", call)

    @property
    def bytes(self) -> int:
        return sum(bank.nbytes for bank in (self.u, self.k, self.g, self.x))

    def layer(self, index: int) -> LayerBank:
        return LayerBank(self.u[index], self.k[index], self.g[index], self.x[index])

    def opened(self, bank_rows: torch.Tensor, depths: torch.Tensor) -> None:
        """A verify is about to write these rows; depths [N]: tokens already in each request's state."""
        self.depth[bank_rows] = depths

    def commit(
        self,
        pool: MambaPool,
        *,
        slots: torch.Tensor,
        bank_rows: torch.Tensor,
        depths: torch.Tensor,
        counts: torch.Tensor,
        track_offsets: torch.Tensor,
        track_slots: torch.Tensor,
    ) -> None:
        """Replay counts [N] recorded tokens into the states and windows of all layers, in one call each.

        slots, bank_rows, depths [N]: as at the verify. track_offsets, track_slots [N]: where a checkpoint
        lies inside the accepted run (see `kda.commit`). Raises StaleRecords, having changed nothing, when
        a count is out of range or the records are another step's; each row can be committed once.
        """
        wrong = (counts < 0) | (counts > self.rows) | (self.depth[bank_rows] != depths)
        if wrong.any():
            first = int(wrong.nonzero()[0])
            raise StaleRecords(
                f"request row {int(bank_rows[first])}: {int(counts[first])} tokens to commit at depth "
                f"{int(depths[first])}, but its records hold {self.rows} tokens from depth "
                f"{int(self.depth[bank_rows[first]])}"
            )
        self.depth[bank_rows] = _NOTHING
        tracks = track_offsets, track_slots
        self._commit_states(
            pool.mamba_cache.temporal, slots, bank_rows, self.u, self.k, self.g, counts, *tracks
        )
        self._commit_windows(pool.mamba_cache.conv[0], slots, bank_rows, self.x, counts, *tracks)


class RecordingStatePool(MambaPool):
    """SGLang's state pool with banks of records instead of its scratch of one state per drafted token."""

    records: ReplayRecords

    def __init__(self, *, speculative_num_draft_tokens: int, spec_state_size: int, **pool: Any) -> None:
        # Told of no drafts, SGLang allocates neither the scratch nor wider windows.
        super().__init__(spec_state_size=spec_state_size, speculative_num_draft_tokens=None, **pool)
        from sglang.srt.runtime_context import get_exec

        params = pool["cache_params"]
        self.records = ReplayRecords(
            fields_of(params),
            layers=len(pool["mamba_layer_ids"]),
            requests=spec_state_size,
            rows=speculative_num_draft_tokens,
            device=pool["device"],
            exact=bool(get_exec().deterministic.enable_deterministic_inference),
        )
        logger.info(
            "replay records: %d requests x %d rows, %.1f MB (%d bytes a row and layer; a state has %d)",
            spec_state_size,
            speculative_num_draft_tokens,
            self.records.bytes / 1e6,
            sum(field.bytes for field in fields_of(params)),
            self.mamba_cache.temporal[0, 0].nbytes,
        )


def records_of(req_pool: Any) -> ReplayRecords:
    """The banks of a server that speculates, from its request pool."""
    return req_pool.mamba_pool.records


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
    each = bytes_per_request(params, get_spec().speculative_num_draft_tokens)
    banks = each * (requests + 1) / _GIB
    logger.info("planned %.3f GiB of replay records: %d requests x %.1f MB", banks, requests, each / 1e6)
    planner.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        return original(planner, total_rest_memory - banks)
    finally:
        planner.spec_algorithm = algorithm
