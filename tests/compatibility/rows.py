"""What a row of the table says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """What comes of giving a flag of a family, with a Kimi model on a CPU."""

    WORKS = "works"
    REFUSED = "refused at start"
    INERT = "changes nothing"
    UNTRIED = "not run"


@dataclass(frozen=True)
class Family:
    """Flags of SGLang that do one thing together.

    flags: fields of SGLang's ServerArgs, in one string. settings: further fields that mean something beside
    `flags` only; what is refused makes them moot. shown_by: tests, as file or file::test. given: for what
    changes nothing, the command line that the test starts its server with.
    """

    name: str
    outcome: Outcome
    flags: str
    says: str = ""
    settings: str = ""
    shown_by: tuple[str, ...] = ()
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Feature:
    """What this package does, by where it was run. An empty cell: nobody has run it there."""

    name: str
    reference: str = ""
    server: str = ""
    emulated_npu: str = ""
    shown_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Surrounding:
    """What holds of the installation, the machine, and the command line beside the server."""

    name: str
    says: str
    shown_by: tuple[str, ...] = ()
