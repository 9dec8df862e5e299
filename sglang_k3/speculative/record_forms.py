"""When recorded tokens enter a state: the forms of design 5, chosen by SGLANG_K3_RECORDS.

A request's records are a ring. What was accepted and is not in the state yet is the ring's tail, which a
verify reads beside the state. The forms differ in how long a tail may grow, and in where it ends.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

VARIABLE = "SGLANG_K3_RECORDS"

BOUNDARY = 64
"""Tokens. An anchored state is the one at the last multiple of it; a checkpoint can stand there."""


@dataclass(frozen=True)
class Form:
    """blocks: the ring's rows, in steps of D drafted rows; None: as many as lie between two boundaries."""

    name: str
    blocks: int | None
    what: str

    @property
    def at_once(self) -> bool:
        """A commit follows each verify, and there is never a tail; otherwise a verify writes the state on its
        way as soon as another step would not fit."""
        return self.blocks == 1

    @property
    def anchored(self) -> bool:
        """A state moves from boundary to boundary, by the commit that crosses one, and into another slot
        where there is one. Its slot is a checkpoint as it stands, so the live window is kept elsewhere."""
        return self.blocks is None

    def ring(self, rows: int) -> int:
        """Rows of a request's ring, where `rows` are verified a step."""
        return BOUNDARY - 1 + rows if self.blocks is None else self.blocks * rows


FORMS = {
    form.name: form
    for form in (
        Form("plain", 1, "commit after each verify"),
        Form("folded", 2, "the next verify writes the state of the last one"),
        Form("ring", 4, "states are written when three steps' records are full"),
        Form("anchored", None, f"states are those of the last multiple of {BOUNDARY} tokens"),
    )
}
DEFAULT, DEFAULT_ON_NPU = "folded", "plain"
"""A commit is about one percent of a step on an NPU, and plain keeps the fewest records."""


def chosen() -> Form:
    """The form of this server. Raises ValueError naming the value and what there is."""
    from sglang.srt.platforms import current_platform

    default = DEFAULT_ON_NPU if current_platform.device_type == "npu" else DEFAULT
    name = os.environ.get(VARIABLE, default)
    if name not in FORMS:
        raise ValueError(f"{VARIABLE}={name}: pass one of {', '.join(FORMS)}, or unset it for {default}")
    return FORMS[name]
