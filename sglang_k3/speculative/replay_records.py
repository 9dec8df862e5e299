"""Banks of replay records: what verify leaves behind instead of states, and how they enter a state.

A bank row belongs to a running request (its row in req_to_token), never to a cached slot, so a checkpoint
in the prefix cache costs nothing here. No tensor has a draft dimension beside a state's [V, K]. A request's
rows are a ring: accepted tokens that its state lacks are the tail (record_forms.py says how long it gets),
a verify's new rows lie behind it. Each bank row remembers the depth and the slot of the state it goes on
from; a commit that expects another depth is refused, because replaying a late or foreign record would leave
a state that no prompt has. Windows of the convolution are small and never lag.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.memory_pool import MambaPool

from sglang_k3.kernels.kda.record import Field, record_row
from sglang_k3.kernels.registry import Call, choose
from sglang_k3.models.runtime import compute_dtype
from sglang_k3.speculative.record_forms import Form, chosen

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_NOTHING = -1


class StaleRecords(RuntimeError):
    """A commit met records of another step. The state was left as it was."""


@dataclass(frozen=True)
class LayerBank:
    """One layer's banks: u [B, R, H, V], k and g [B, R, H, K], x [B, D, C]."""

    u: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    x: torch.Tensor


class Tail(NamedTuple):
    """What a verify finds between the states and its tokens, all [N] int64: see `kda.verify`."""

    starts: torch.Tensor
    tails: torch.Tensor
    fold_slots: torch.Tensor


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


def layer_bytes(fields: tuple[Field, ...], rows: int, form: Form) -> int:
    """Bytes of one running request's banks of one layer, `rows` drafted rows a step."""
    *ring, conv = fields
    return rows * (form.blocks * sum(field.bytes for field in ring) + conv.bytes)


def bytes_per_request(cache_params: Any, rows: int, form: Form) -> int:
    """The same over all KDA layers of this rank."""
    return len(cache_params.layers) * layer_bytes(fields_of(cache_params), rows, form)


class ReplayRecords:
    """Banks for `requests` running requests (and row 0, which is padding), `rows` drafted rows, `layers`."""

    def __init__(
        self,
        fields: tuple[Field, ...],
        *,
        layers: int,
        requests: int,
        rows: int,
        form: Form,
        device: str,
        exact: bool,
    ) -> None:
        self.rows = rows
        self.form = form
        self.ring = rows * form.blocks
        self.u, self.k, self.g, self.x = (
            torch.zeros(
                layers,
                requests + 1,
                rows if field.name == "x" else self.ring,
                *field.shape,
                dtype=field.dtype,
                device=device,
            )
            for field in fields
        )
        nothing = torch.full((requests + 1,), _NOTHING, dtype=torch.int64, device=device)
        self.depth, self.slot = nothing, nothing.clone()
        """[B]: tokens in the state that a row goes on from, and its slot; -1 where it goes on from none."""
        self.starts, self.tails = torch.zeros_like(nothing), torch.zeros_like(nothing)
        self.verified = torch.zeros_like(nothing, dtype=torch.bool)
        """[B]: a verify wrote rows that are not committed yet."""
        call = Call(torch.device(device).type, self.k.dtype, exact)
        self._commit_states = choose("kda.commit", call)
        self._commit_windows = choose("short_conv.commit", call)

    @property
    def bytes(self) -> int:
        return sum(bank.nbytes for bank in (self.u, self.k, self.g, self.x))

    def layer(self, index: int) -> LayerBank:
        return LayerBank(self.u[index], self.k[index], self.g[index], self.x[index])

    def opened(self, bank_rows: torch.Tensor, depths: torch.Tensor, slots: torch.Tensor) -> Tail:
        """A verify is about to write rows of these requests. depths [N]: committed tokens; slots [N].

        Returns what it finds behind the states. May be asked again for the same verify. Raises StaleRecords
        where a request's tail does not end at its depth.
        """
        starts, tails = self.starts[bank_rows], self.tails[bank_rows]
        known = self.depth[bank_rows] != _NOTHING
        self._check(known & (self.depth[bank_rows] + tails != depths), bank_rows, depths, tails)
        self.depth[bank_rows], self.slot[bank_rows] = depths - tails, slots
        self.verified[bank_rows] = True
        return Tail(starts, tails, torch.where(self._folds(tails), slots, _NOTHING))

    def _folds(self, tails: torch.Tensor) -> torch.Tensor:
        """[N] bool: the verify behind such a tail writes the state, because another one would not fit."""
        return (tails > 0) & (tails + 2 * self.rows > self.ring)

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
        """The first counts [N] tokens of the last verify are accepted: one call each for all layers.

        slots, bank_rows, depths [N]: as at the verify. track_offsets, track_slots [N]: where a checkpoint
        lies inside the accepted run (see `kda.commit`); it takes the tail into the state. Raises
        StaleRecords, having changed nothing, when a count is out of range or the records are another step's;
        each verify can be committed once.
        """
        tails = self.tails[bank_rows]
        wrong = (counts < 0) | (counts > self.rows) | ~self.verified[bank_rows]
        self._check(wrong | (self.depth[bank_rows] + tails != depths), bank_rows, depths, counts)
        self.verified[bank_rows] = False
        starts, folded = self.starts[bank_rows], self._folds(tails)
        starts = torch.where(folded, (starts + tails) % self.ring, starts)
        tails = torch.where(folded, 0, tails)
        kept = (track_slots >= 0) & (track_offsets >= 0) & (track_offsets <= counts)
        due = torch.ones_like(kept) if self.form.at_once else kept
        together = tails + counts
        targets = torch.where(kept, track_slots, _NOTHING)
        self.forget_slots(targets)
        accepted = torch.where(due, together, 0)
        self._enter_states(pool, slots, bank_rows, starts, accepted, tails + track_offsets, targets)
        self._commit_windows(
            pool.mamba_cache.conv[0], slots, bank_rows, self.x, counts, track_offsets, track_slots
        )
        self._go_on(bank_rows, slots, depths + counts, starts, together, due)

    def settle(self, pool: MambaPool, bank_rows: torch.Tensor, slots: torch.Tensor) -> None:
        """These requests' states are about to be read: their tails enter them, [N] each."""
        ours = (self.slot[bank_rows] == slots) & (self.tails[bank_rows] > 0)
        if not ours.any():
            return
        bank_rows, slots = bank_rows[ours], slots[ours]
        starts, tails = self.starts[bank_rows], self.tails[bank_rows]
        nowhere = torch.full_like(slots, _NOTHING)
        self._enter_states(pool, slots, bank_rows, starts, tails, nowhere, nowhere)
        depths = self.depth[bank_rows] + tails
        self._go_on(bank_rows, slots, depths, starts, tails, torch.ones_like(slots, dtype=torch.bool))

    def settle_slots(self, pool: MambaPool, slots: torch.Tensor) -> None:
        """The same by slot, for readers that know no request."""
        rows = (torch.isin(self.slot, slots.to(self.slot)) & (self.tails > 0)).nonzero().view(-1)
        self.settle(pool, rows, self.slot[rows])

    def forget(self, bank_rows: torch.Tensor) -> None:
        """Other requests have these rows now, and go on from other states."""
        self.depth[bank_rows] = self.slot[bank_rows] = _NOTHING
        self.tails[bank_rows] = 0
        self.verified[bank_rows] = False

    def forget_slots(self, slots: torch.Tensor) -> None:
        """What these slots held is overwritten, -1 aside: no row goes on from it any more, also not one of a
        request that has ended and whose slot found another use."""
        gone = torch.isin(self.slot, slots.to(self.slot)) & (self.slot != _NOTHING)
        self.forget(gone.nonzero().view(-1))

    def _enter_states(
        self,
        pool: MambaPool,
        slots: torch.Tensor,
        bank_rows: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
        *tracks: torch.Tensor,
    ) -> None:
        # On a CPU a look at the counts is free; a device would have to be waited for.
        if counts.device.type == "cpu" and not counts.any():
            return
        banks = self.u, self.k, self.g
        self._commit_states(pool.mamba_cache.temporal, slots, bank_rows, *banks, starts, counts, *tracks)

    def _go_on(
        self,
        bank_rows: torch.Tensor,
        slots: torch.Tensor,
        depths: torch.Tensor,
        starts: torch.Tensor,
        tails: torch.Tensor,
        entered: torch.Tensor,
    ) -> None:
        """Note that states at depths - tails lack their tails, or where entered [N] that they have them."""
        self.slot[bank_rows] = slots
        self.depth[bank_rows] = torch.where(entered, depths, depths - tails)
        self.starts[bank_rows] = torch.where(entered, (starts + tails) % self.ring, starts)
        self.tails[bank_rows] = torch.where(entered, 0, tails)

    def _check(
        self, wrong: torch.Tensor, bank_rows: torch.Tensor, depths: torch.Tensor, counts: torch.Tensor
    ) -> None:
        if wrong.any():
            first = int(wrong.nonzero()[0])
            row = int(bank_rows[first])
            raise StaleRecords(
                f"request row {row}: {int(counts[first])} tokens at depth {int(depths[first])}, but its "
                f"records hold {self.rows if self.verified[row] else 0} tokens of a step and "
                f"{int(self.tails[row])} before them from depth {int(self.depth[row])}"
            )


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
            form=chosen(),
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
    each = bytes_per_request(params, get_spec().speculative_num_draft_tokens, chosen())
    banks = each * (requests + 1) / _GIB
    logger.info("planned %.3f GiB of replay records: %d requests x %.1f MB", banks, requests, each / 1e6)
    planner.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        return original(planner, total_rest_memory - banks)
    finally:
        planner.spec_algorithm = algorithm
