"""Writes docs/compatibility.md."""

from __future__ import annotations

from tests.compatibility.markdown import page
from tests.environment import ROOT

PAGE = ROOT / "docs" / "compatibility.md"

if __name__ == "__main__":
    PAGE.write_text(page())
