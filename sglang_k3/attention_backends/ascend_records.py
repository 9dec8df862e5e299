"""Replay records on a device: the same banks and rules, and no look at a value on the way.

Where the CPU's records raise at once, these leave the state alone, note the fault on the device and raise a
step or two later, when the note has reached the host by itself.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_k3.speculative.replay_records import ReplayRecords, StaleRecords

_NOTHING = -1


class DeviceRecords(ReplayRecords):
    """`ReplayRecords` for tensors that the host must not wait for."""

    def __init__(self, *arguments: Any, device: str, **rest: Any) -> None:
        super().__init__(*arguments, device=device, **rest)
        self.tracking = True
        """Whether a checkpoint may lie inside the next accepted run, as far as the host knows."""
        states, windows = self._commit_states, self._commit_windows
        self._commit_states = lambda *given: states(*given, tracking=self.tracking)
        self._commit_windows = lambda *given: windows(*given, tracking=self.tracking)
        self._fault = torch.zeros(1, dtype=torch.bool, device=device)
        self._seen: torch.Tensor | None = None
        self._copied: Any = None

    def look(self) -> None:
        """Raise StaleRecords for a fault whose note has arrived; start the next note on its way."""
        if self._copied is not None:
            if not self._copied.query():
                return
            assert self._seen is not None
            if bool(self._seen[0]):
                raise StaleRecords("a commit or verify met records of another step; its state was left alone")
        else:
            self._seen = torch.zeros(1, dtype=torch.bool, pin_memory=True)
            self._copied = torch.get_device_module(self._fault.device).Event()
        assert self._seen is not None
        self._seen.copy_(self._fault, non_blocking=True)
        self._copied.record()

    def _check(
        self, wrong: torch.Tensor, bank_rows: torch.Tensor, depths: torch.Tensor, counts: torch.Tensor
    ) -> None:
        self._fault |= wrong.any()

    def commit(
        self,
        pool: Any,
        *,
        bank_rows: torch.Tensor,
        depths: torch.Tensor,
        counts: torch.Tensor,
        track_offsets: torch.Tensor,
        track_slots: torch.Tensor,
    ) -> None:
        wrong = (counts < 0) | (counts > self.rows) | ~self.verified[bank_rows]
        wrong |= self.depth[bank_rows] + self.tails[bank_rows] != depths
        super().commit(
            pool,
            bank_rows=bank_rows,
            depths=depths,
            counts=torch.where(wrong, 0, counts),
            track_offsets=torch.where(wrong, _NOTHING, track_offsets),
            track_slots=track_slots,
        )

    def settle(self, pool: Any, bank_rows: torch.Tensor, slots: torch.Tensor) -> None:
        if self.form.at_once:
            return  # there is never a tail
        ours = (self.slot[bank_rows] == slots) & (self.tails[bank_rows] > 0) & (slots >= 0)
        starts, tails = self.starts[bank_rows], torch.where(ours, self.tails[bank_rows], 0)
        nowhere = torch.full_like(slots, _NOTHING)
        states = torch.where(ours, slots, nowhere)
        self._enter_states(pool, states, states, bank_rows, starts, tails, nowhere, nowhere)
        # The rest keep what they had: their tail of 0 has entered.
        self.depth[bank_rows] += tails
        self.starts[bank_rows] = (starts + tails) % self.ring
        self.tails[bank_rows] -= tails

    def settle_slots(self, pool: Any, slots: torch.Tensor) -> None:
        if self.form.at_once:
            return
        rows = torch.arange(len(self.slot), device=self.slot.device)
        self.settle(pool, rows, torch.where(self._holds(slots), self.slot, _NOTHING))

    def forget_slots(self, slots: torch.Tensor) -> None:
        gone = self._holds(slots)
        self.depth.masked_fill_(gone, _NOTHING)
        self.slot.masked_fill_(gone, _NOTHING)
        self.tails.masked_fill_(gone, 0)
        self.verified.masked_fill_(gone, False)

    def _holds(self, slots: torch.Tensor) -> torch.Tensor:
        """[B] bool: the row goes on from one of these slots."""
        same = self.slot.unsqueeze(1) == slots.to(self.slot).view(1, -1)
        return same.any(1) & (self.slot != _NOTHING)
