"""Every operator of the serving path, at the shapes of Kimi K3."""

from __future__ import annotations

from benchmarks.cases import attention, drafts, kda, moe, rows
from benchmarks.cases.case import Case, Sizes

__all__ = ["Case", "Sizes", "all_cases"]


def all_cases(sizes: Sizes, full: bool = False) -> list[Case]:
    """In the order of the table. `full`: see kda.cases."""
    return [
        *kda.cases(sizes, full),
        *drafts.cases(sizes),
        *rows.cases(sizes),
        *attention.cases(sizes),
        *moe.cases(sizes),
    ]
