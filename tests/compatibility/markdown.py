"""docs/compatibility.md, from the table."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_k3.refused_flags import REFUSALS
from tests.compatibility.features import FEATURES, SURROUNDINGS
from tests.compatibility.rows import Family, Outcome
from tests.compatibility.table import SECTIONS, options

_HEAD = """# Compatibility

Written by `python -m tests.compatibility`; a test holds this page against its table, the table against
the tests that it names, and its flags against every flag of the installed SGLang.

Validated with {versions} on Python 3.11, x86-64, two cores. **Nothing was run on a real NPU**: A3 and
950 have no column, because every cell would be empty. An empty cell means that nobody has run it there;
nothing is claimed for it.

Each test is run by `make test` (`tests/npu/` by `make test-npu`, tests marked verify by `make verify`),
or alone by `.venv/bin/python -m pytest TEST`.

## Features

Columns: **reference** is the plain torch model on a CPU, **server** a real `sglang.launch_server`, its
scheduler or its model runner on a CPU, **emulated NPU** the emulated device of [ascend.md](ascend.md).
"""

_FLAGS = """## SGLang's flags, with a Kimi model on a CPU

A family of flags a row: **works**; **refused at start**, by name, with the reason; **changes nothing**,
where a test starts a server with all of these flags and its answers keep their bits; **not run**. Which
family a flag belongs to is in the [index](#index-of-flags). What differs on an NPU:
[ascend.md](ascend.md).
"""

_INDEX = """## Index of flags

Every flag of SGLang {version} by its family. In brackets: settings that mean something beside the others
of the family only.
"""


def _versions() -> str:
    from importlib.metadata import version

    return ", ".join(f"{name} {version(name)}" for name in ("sglang", "torch", "transformers", "numba"))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines] + [""]


def _tests(shown_by: tuple[str, ...]) -> str:
    return ", ".join(f"`{test}`" for test in shown_by)


def _reasons(family: Family) -> list[str]:
    """What the server answers to this family's flags."""
    named = set(family.flags.split())
    return [refusal.why for refusal in REFUSALS if named & set(refusal.names.split())]


def _says(family: Family) -> str:
    reasons = _reasons(family) if family.outcome is Outcome.REFUSED else []
    return f"**{family.outcome.value}**" + "".join(f"; {part}" for part in (*reasons, family.says) if part)


def _flags(names: str) -> str:
    spelled = options()
    return " ".join(f"`{spelled[name] or name}`" for name in names.split())


def _name(family: Family) -> str:
    """With its first flags; the index has all."""
    first, *rest = family.flags.split()
    more = f" and {len(rest)} more" if rest else ""
    return f"{family.name}: {_flags(first)}{more}"


def page() -> str:
    """The whole page."""
    from importlib.metadata import version

    lines = [_HEAD.format(versions=_versions())]
    lines += _table(
        ("feature", "reference", "server", "emulated NPU", "shown by"),
        ((f.name, f.reference, f.server, f.emulated_npu, _tests(f.shown_by)) for f in FEATURES),
    )
    lines.append(_FLAGS)
    for title, families in SECTIONS:
        lines += [f"### {title}", ""]
        lines += _table(
            ("family", "", "shown by"),
            ((_name(family), _says(family), _tests(family.shown_by)) for family in families),
        )
    lines += ["## Around SGLang", ""]
    lines += _table(("", "", "shown by"), ((s.name, s.says, _tests(s.shown_by)) for s in SURROUNDINGS))
    lines.append(_INDEX.format(version=version("sglang")))
    for _, families in SECTIONS:
        for family in families:
            more = f" ({_flags(family.settings)})" if family.settings else ""
            lines.append(f"- **{family.name}**: {_flags(family.flags)}{more}")
    return "\n".join(lines) + "\n"
