"""The one error of a plan."""

from __future__ import annotations


class PlanError(ValueError):
    """A deployment that can't be planned; the message names the value and the remedy."""
