"""Makes a folder of packages that holds only some of the installed distributions."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def with_requirements(*roots: str) -> set[str]:
    """The installed distributions that `roots` need, themselves among them, by canonical name."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        try:
            requires = metadata.distribution(name).requires or ()
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for requirement in map(Requirement, requires):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def link(distributions: set[str], folder: Path) -> Path:
    """Link the distributions' files and metadata into `folder`, for `python -S` with it on PYTHONPATH."""
    for name in distributions:
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder
