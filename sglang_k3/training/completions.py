"""How many completions of held-out function heads are Python."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sglang_k3.training.data import functions

COUNT = 40
NEW_TOKENS = 96
_LONGEST_HEAD = 200


@dataclass(frozen=True)
class Completion:
    head: str
    text: str
    """What the model wrote behind the head."""

    @property
    def code(self) -> str:
        """Head and text up to the last full line."""
        whole = self.head + self.text
        return whole[: whole.rfind("\n") + 1]

    @property
    def parses(self) -> bool:
        """Whether the code is Python. A head alone isn't: its body is lacking."""
        try:
            ast.parse(self.code)
        except (SyntaxError, ValueError):
            return False
        return True


def function_heads(held_out: Mapping[str, str], count: int = COUNT) -> list[str]:
    """Heads of `count` functions, spread evenly over the held-out files in order of their names."""
    heads = [
        function.head
        for name in sorted(held_out)
        for function in functions(held_out[name])
        if len(function.head) <= _LONGEST_HEAD
    ]
    return [heads[i * len(heads) // count] for i in range(count)]


def complete(heads: list[str], generate: Callable[[str], str]) -> list[Completion]:
    """generate: the text that the model writes behind a prompt."""
    return [Completion(head, generate(head)) for head in heads]


def share_parsed(completions: list[Completion]) -> float:
    return sum(completion.parses for completion in completions) / len(completions)
