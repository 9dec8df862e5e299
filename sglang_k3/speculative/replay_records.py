"""Banks of replay records: what verify leaves behind instead of states, and how they enter a state.

A bank row belongs to a running request (its row in req_to_token), never to a cached slot, so a checkpoint
in the prefix cache costs nothing here. No tensor has a draft dimension beside a state's [V, K]. A request's
rows are a ring: accepted tokens that its state lacks are the tail (record_forms.py says how long it gets),
a verify's new rows lie behind it. Each bank row remembers the depth and the slot of the state it goes on
from; a commit that expects another depth is refused, because replaying a late or foreign record would leave
a state that no prompt has. Windows of the convolution are small and never lag; an anchored state's own window
stays beside it, and the live one is a bank too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.memory_pool import MambaPool

from sglang_k3.kernels.kda.record import Field, record_row
from sglang_k3.kernels.registry import Call, choose
from sglang_k3.models.runtime import compute_dtype
from sglang_k3.speculative.record_forms import Form

_NOTHING = -1


class StaleRecords(RuntimeError):
    """A commit met records of another step. The state was left as it was."""


@dataclass(frozen=True)
class LayerBank:
    """One layer's banks: u [B, R, H, V], k and g [B, R, H, K], x [B, D, C]; windows [B, W - 1, C] where the
    live ones are not in the states' slots."""

    u: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    x: torch.Tensor
    windows: torch.Tensor | None


class Tail(NamedTuple):
    """The states that a verify goes on from, and what it finds between them and its tokens, all [N] int64:
    see `kda.verify`."""

    slots: torch.Tensor
    starts: torch.Tensor
    tails: torch.Tensor
    fold_slots: torch.Tensor


def fields_of(cache_params: Any, device: str | None = None) -> tuple[Field, ...]:
    """The record row of a model, from the state shapes that SGLang's pools are built from. device: a torch
    device type, by default this process's."""
    heads, value_dim, key_dim = cache_params.shape.temporal
    ((_, channels),) = cache_params.shape.conv
    window = cache_params.dtype.conv
    return record_row(
        heads=heads,
        value_dim=value_dim,
        key_dim=key_dim,
        channels=channels,
        activation=compute_dtype(window, device),
        window=window,
    )


def window_rows_of(cache_params: Any) -> int:
    """W - 1: the rows before a token that its convolution reads."""
    ((rows, _),) = cache_params.shape.conv
    return rows


def layer_bytes(fields: tuple[Field, ...], rows: int, form: Form, window_rows: int) -> int:
    """Bytes of one running request's banks of one layer, `rows` drafted rows a step."""
    *ring, conv = fields
    conv_rows = rows + (window_rows if form.anchored else 0)
    return form.ring(rows) * sum(field.bytes for field in ring) + conv_rows * conv.bytes


def bytes_per_request(cache_params: Any, rows: int, form: Form, device: str | None = None) -> int:
    """The same over all KDA layers of this rank."""
    each = layer_bytes(fields_of(cache_params, device), rows, form, window_rows_of(cache_params))
    return len(cache_params.layers) * each


def bank_bytes(
    cache_params: Any, rows: int, form: Form, requests: int, device: str | None = None
) -> tuple[int, int]:
    """Bytes of a rank's banks for so many running requests and the padding row, and of one request's."""
    each = bytes_per_request(cache_params, rows, form, device)
    return each * (requests + 1), each


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
        window_rows: int,
        device: str,
        exact: bool,
    ) -> None:
        self.rows = rows
        self.form = form
        self.ring = form.ring(rows)

        def bank(field: Field, count: int) -> torch.Tensor:
            shape = layers, requests + 1, count, *field.shape
            return torch.zeros(shape, dtype=field.dtype, device=device)

        *recorded, conv = fields
        self.u, self.k, self.g = (bank(field, self.ring) for field in recorded)
        self.x = bank(conv, rows)
        self.windows = bank(conv, window_rows) if form.anchored else None
        nothing = torch.full((requests + 1,), _NOTHING, dtype=torch.int64, device=device)
        self.depth, self.slot = nothing, nothing.clone()
        """[B]: tokens in the state that a row goes on from, and its slot; -1 where it goes on from none."""
        self.starts, self.tails = torch.zeros_like(nothing), torch.zeros_like(nothing)
        self.verified = torch.zeros_like(nothing, dtype=torch.bool)
        """[B]: a verify wrote rows that are not committed yet."""
        dims = {"K": self.k.shape[-1], "V": self.u.shape[-1], "taps": window_rows + 1}
        call = Call(torch.device(device).type, self.k.dtype, exact, dims)
        self._commit_states = choose("kda.commit", call)
        self._commit_windows = choose("short_conv.commit", call)

    @property
    def bytes(self) -> int:
        banks = self.u, self.k, self.g, self.x, self.windows
        return sum(bank.nbytes for bank in banks if bank is not None)

    def layer(self, index: int) -> LayerBank:
        windows = None if self.windows is None else self.windows[index]
        return LayerBank(self.u[index], self.k[index], self.g[index], self.x[index], windows)

    def opened(
        self, pool: MambaPool, bank_rows: torch.Tensor, depths: torch.Tensor, slots: torch.Tensor
    ) -> Tail:
        """A verify is about to write rows of these requests. depths [N]: committed tokens; slots [N]: where
        the states of requests are that had no verify since their prefill.

        Returns where all states are, and what the verify finds behind them. May be asked again for the same
        verify. Raises StaleRecords where a request's tail does not end at its depth, or leaves no room.
        """
        starts, tails = self.starts[bank_rows], self.tails[bank_rows]
        known = self.depth[bank_rows] != _NOTHING
        wrong = known & (self.depth[bank_rows] + tails != depths)
        self._check(wrong | (tails + self.rows > self.ring), bank_rows, depths, tails)
        slots = torch.where(known, self.slot[bank_rows], slots)
        if self.windows is not None:
            new = ~known & (slots != _NOTHING)
            self.windows[:, bank_rows[new]] = pool.mamba_cache.conv[0][:, slots[new]]
        self.depth[bank_rows], self.slot[bank_rows] = depths - tails, slots
        self.verified[bank_rows] = True
        return Tail(slots, starts, tails, torch.where(self._folds(tails), slots, _NOTHING))

    def _folds(self, tails: torch.Tensor) -> torch.Tensor:
        """[N] bool: the verify behind such a tail writes the state, because another one would not fit."""
        if self.form.anchored:
            return torch.zeros_like(tails, dtype=torch.bool)
        return (tails > 0) & (tails + 2 * self.rows > self.ring)

    def commit(
        self,
        pool: MambaPool,
        *,
        bank_rows: torch.Tensor,
        depths: torch.Tensor,
        counts: torch.Tensor,
        track_offsets: torch.Tensor,
        track_slots: torch.Tensor,
    ) -> None:
        """The first counts [N] tokens of the last verify are accepted: one call each for all layers.

        bank_rows, depths [N]: as at the verify. track_offsets, track_slots [N]: where a boundary lies inside
        the accepted run, and the slot of its checkpoint (see `kda.commit`); it takes the tail into the
        state. An anchored state goes over into that slot, or stays in its own where there is none (-1).
        Raises StaleRecords, having changed nothing, when a count is out of range or the records are another
        step's; each verify can be committed once.
        """
        tails = self.tails[bank_rows]
        wrong = (counts < 0) | (counts > self.rows) | ~self.verified[bank_rows]
        self._check(wrong | (self.depth[bank_rows] + tails != depths), bank_rows, depths, counts)
        self.verified[bank_rows] = False
        slots, starts, folded = self.slot[bank_rows], self.starts[bank_rows], self._folds(tails)
        starts = torch.where(folded, (starts + tails) % self.ring, starts)
        tails = torch.where(folded, 0, tails)
        crossed = (track_offsets >= 0) & (track_offsets <= counts)
        kept = torch.where(crossed, track_slots, _NOTHING)
        self.forget_slots(kept)
        nowhere = torch.full_like(slots, _NOTHING)
        if self.windows is not None:
            entering = torch.where(crossed, tails + track_offsets, 0)
            targets = torch.where(kept != _NOTHING, kept, slots)
            self._enter_states(pool, slots, targets, bank_rows, starts, entering, nowhere, nowhere)
            kept = torch.where(crossed, targets, _NOTHING)
            live, rows = self.windows, torch.where(slots == _NOTHING, _NOTHING, bank_rows)
        else:
            due = torch.ones_like(crossed) if self.form.at_once else kept != _NOTHING
            entering, targets = torch.where(due, tails + counts, 0), slots
            tracks = tails + track_offsets, kept
            self._enter_states(pool, slots, targets, bank_rows, starts, entering, *tracks)
            live, rows = pool.mamba_cache.conv[0], slots
        windows = pool.mamba_cache.conv[0]
        self._commit_windows(live, rows, bank_rows, self.x, counts, windows, track_offsets, kept)
        self._go_on(bank_rows, targets, depths + counts, starts, tails + counts, entering)

    def settle(self, pool: MambaPool, bank_rows: torch.Tensor, slots: torch.Tensor) -> None:
        """These requests' states are about to be read: their tails enter them, [N] each."""
        ours = (self.slot[bank_rows] == slots) & (self.tails[bank_rows] > 0)
        if not ours.any():
            return
        bank_rows, slots = bank_rows[ours], slots[ours]
        starts, tails = self.starts[bank_rows], self.tails[bank_rows]
        nowhere = torch.full_like(slots, _NOTHING)
        self._enter_states(pool, slots, slots, bank_rows, starts, tails, nowhere, nowhere)
        if self.windows is not None:
            pool.mamba_cache.conv[0][:, slots] = self.windows[:, bank_rows]
        self._go_on(bank_rows, slots, self.depth[bank_rows] + tails, starts, tails, tails)

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
        targets: torch.Tensor,
        bank_rows: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
        *tracks: torch.Tensor,
    ) -> None:
        # On a CPU a look at the counts is free; a device would have to be waited for.
        if counts.device.type == "cpu" and not counts.any():
            return
        places, banks = (slots, targets, bank_rows), (self.u, self.k, self.g)
        self._commit_states(pool.mamba_cache.temporal, *places, *banks, starts, counts, *tracks)

    def _go_on(
        self,
        bank_rows: torch.Tensor,
        slots: torch.Tensor,
        depths: torch.Tensor,
        starts: torch.Tensor,
        tails: torch.Tensor,
        entered: torch.Tensor,
    ) -> None:
        """Note that of `tails` recorded tokens, ending at `depths`, the first `entered` are in the states."""
        self.slot[bank_rows] = slots
        self.depth[bank_rows] = depths - tails + entered
        self.starts[bank_rows] = (starts + entered) % self.ring
        self.tails[bank_rows] = tails - entered

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
