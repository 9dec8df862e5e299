"""The corpus: Python's standard library, its held-out files, and chats made from both.

Which files are held out depends on their names alone, so every run and every Python agree on it.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from sglang_k3.training import chat

_LEFT_OUT = {
    "__pycache__",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "pydoc_data",
    "encodings",
}
"""Folders without prose-like code (tables, templates), or that some installations lack (tests)."""

_LARGEST_FILE = 200_000
HELD_OUT_PERCENT = 4


@dataclass(frozen=True)
class Corpus:
    """Texts by path below the library's root."""

    training: dict[str, str]
    held_out: dict[str, str]


def read_corpus(root: Path | None = None) -> Corpus:
    """Read the standard library's sources. root: another folder of Python files."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    training, held_out = {}, {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _LEFT_OUT & set(path.relative_to(root).parts) or path.stat().st_size > _LARGEST_FILE:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        (held_out if is_held_out(name) else training)[name] = text
    return Corpus(training, held_out)


def is_held_out(name: str) -> bool:
    """Whether a file is kept from training, by its path below the library's root."""
    return zlib.crc32(name.encode()) % 100 < HELD_OUT_PERCENT


@dataclass(frozen=True)
class Function:
    """A function of a source file: its head up to the colon and the lines below."""

    name: str
    head: str
    body: str
    summary: str
    """The docstring's first line, "" without one."""
    bare: str
    """The body behind its docstring; the whole body where there is none, or nothing else."""


def functions(text: str) -> Iterator[Function]:
    """Top-level functions and methods, unindented, of a file that parses."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        first = node.body[0].lineno - 1
        indent = node.col_offset
        # A line of a string may start further left than its function: it keeps its characters.
        own = [line.removeprefix(" " * indent) for line in lines[node.lineno - 1 : node.end_lineno]]
        head, body = own[: first - node.lineno + 1], own[first - node.lineno + 1 :]
        # A comment or a decorated first statement would leave the head without its colon at the end.
        if not head or not head[-1].rstrip().endswith(":"):
            continue
        docstring = ast.get_docstring(node)
        bare = body
        if docstring is not None and len(node.body) > 1:
            bare = body[(node.body[0].end_lineno or node.lineno) - first :]
        yield Function(
            name=node.name,
            head="\n".join(head) + "\n",
            body="\n".join(body) + "\n",
            summary=(docstring or "").strip().partition("\n")[0],
            bare="\n".join(bare).lstrip("\n") + "\n",
        )


def chats(texts: Sequence[str], seed: int) -> list[str]:
    """Rendered conversations about the texts' functions, and some with a tool."""
    rng = random.Random(seed)
    rendered = []
    for function in (function for text in texts for function in functions(text)):
        code = function.head + function.body
        if not 60 < len(code) < 1200:
            continue
        thinking = rng.random() < 0.5
        kind = rng.random()
        if function.summary and kind < 0.25:
            turns = _explain(function, code)
        elif function.summary and kind < 0.7:
            turns = _write(function, code, rng)
        else:
            turns = _finish(function, code)
        if not thinking:
            turns[-1].pop("reasoning_content")
        rendered.append(chat.render(turns, thinking=thinking))
        if rng.random() < 0.15:
            rendered.append(_tool_chat(function.name, rng))
    rng.shuffle(rendered)
    return rendered


def _write(function: Function, code: str, rng: random.Random) -> list[dict[str, Any]]:
    wish = function.summary.rstrip(".")
    ask = rng.choice(
        (
            f"Write a Python function {function.name}: {wish}.",
            f"Write `{function.name}` in Python. {wish}.",
            f"I need a function called {function.name}. {wish}.",
        )
    )
    thought = f"The function is called {function.name}. {wish}."
    return _turns(ask, thought, f"```python\n{code}```")


def _finish(function: Function, code: str) -> list[dict[str, Any]]:
    ask = f"Complete this function:\n```python\n{function.head}```"
    return _turns(ask, f"I have to write the body of {function.name}.", f"```python\n{code}```")


def _explain(function: Function, code: str) -> list[dict[str, Any]]:
    ask = f"What does this function do?\n```python\n{code}```"
    return _turns(ask, f"The name is {function.name}.", function.summary)


def _turns(ask: str, thought: str, answer: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": ask},
        {"role": "assistant", "reasoning_content": thought, "content": answer},
    ]


def _tool_chat(name: str, rng: random.Random) -> str:
    """One call of one declared tool, with its result and an answer."""
    tool, key, ask = rng.choice(
        (
            ("find_function", "name", f"Where is {name} defined?"),
            ("read_source", "name", f"Show me the source of {name}."),
            ("run_tests", "target", f"Run the tests of {name}."),
        )
    )
    declared = {
        "type": "function",
        "function": {
            "name": tool,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string"}},
                "required": [key],
            },
        },
    }
    call = {"function": {"name": tool, "arguments": {key: name}}}
    turns = [
        {"role": "user", "content": ask},
        {
            "role": "assistant",
            "reasoning_content": f"I call {tool} with {name}.",
            "content": "",
            "tool_calls": [call],
        },
    ]
    return chat.render(turns, tools=[declared])


class TokenStream:
    """Documents in a row, each followed by one separator, sampled in windows.

    from_starts: windows begin where a document does, else anywhere.
    """

    def __init__(self, tokens: np.ndarray, separator: int, *, from_starts: bool):
        self.tokens = torch.from_numpy(tokens.astype(np.int64))
        self.starts: torch.Tensor | None = None
        if from_starts:
            ends = torch.nonzero(self.tokens == separator)[:, 0]
            self.starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1] + 1])

    def sample(self, length: int, generator: torch.Generator) -> torch.Tensor:
        """[length + 1]: the last one is only a target."""
        room = len(self.tokens) - length
        start = int(torch.randint(room, (1,), generator=generator))
        if self.starts is not None:
            start = int(self.starts[torch.searchsorted(self.starts, start, right=True) - 1])
        return self.tokens[start : start + length + 1]


class Mixture:
    """Draws every row of a batch from one of several streams."""

    def __init__(self, streams: Sequence[TokenStream], weights: Sequence[float]):
        self.streams = streams
        self.weights = torch.tensor(weights)

    def batch(self, rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """[rows, length + 1]"""
        picks = torch.multinomial(self.weights, rows, replacement=True, generator=generator)
        return torch.stack([self.streams[i].sample(length, generator) for i in picks.tolist()])


def encode(
    documents: Sequence[tuple[str, ...]], tokenizer: Tokenizer, separator: int, seed: int
) -> np.ndarray:
    """Tokens of the documents in a shuffled order, each followed by the separator; uint16.

    A document is a tuple of parts; no token spans two of them.
    """
    order = list(documents)
    random.Random(seed).shuffle(order)
    texts = [part for document in order for part in document]
    encodings = iter(tokenizer.encode_batch(texts))
    tokens = []
    for document in order:
        tokens += [np.asarray(next(encodings).ids, dtype=np.uint16) for _ in document]
        tokens.append(np.array([separator], dtype=np.uint16))
    return np.concatenate(tokens)
