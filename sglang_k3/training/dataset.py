"""Tokenizer and token streams on disk: made once, read again by a resumed run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from sglang_k3.training import tokenizer as bpe
from sglang_k3.training.data import Corpus, Mixture, TokenStream, chats, encode, functions

SEPARATOR = bpe.token_id("[EOS]")
WEIGHTS = {"library": 0.55, "functions": 0.3, "chats": 0.15}
"""Share of a batch's rows: whole files, functions on their own, conversations about them."""

_LONGEST_FUNCTION = 4000
# The tokenizer sees one chat in so many: their wording repeats and would crowd out code.
_CHATS_FOR_MERGES = 8


@dataclass(frozen=True)
class Dataset:
    tokenizer: Tokenizer
    mixture: Mixture


def prepare(corpus: Corpus, directory: Path, seed: int) -> Dataset:
    """Read the dataset of `directory`, after making it there if it has none."""
    if not all((directory / f"{name}.npy").exists() for name in WEIGHTS):
        _make(corpus, directory, seed)
    streams = [
        TokenStream(np.load(directory / f"{name}.npy"), SEPARATOR, from_starts=name != "library")
        for name in WEIGHTS
    ]
    return Dataset(bpe.load(directory), Mixture(streams, list(WEIGHTS.values())))


def _make(corpus: Corpus, directory: Path, seed: int) -> None:
    library = list(corpus.training.values())
    split = _split_functions(library, seed)
    conversations = chats(library, seed)
    tokenizer = bpe.learn([*library, *conversations[::_CHATS_FOR_MERGES]])
    bpe.save(tokenizer, directory)
    documents = {"library": [(text,) for text in library], "functions": split}
    documents["chats"] = [(text,) for text in conversations]
    for name, parts in documents.items():
        tokens = encode(parts, tokenizer, SEPARATOR, seed)
        np.save(directory / f"{name}.partial.npy", tokens)
        (directory / f"{name}.partial.npy").rename(directory / f"{name}.npy")


def _split_functions(library: Sequence[str], seed: int) -> list[tuple[str, ...]]:
    """The library's functions, most of them in two parts: behind the head, or behind some line.

    A line break and the indentation behind it are one token, so a prompt that ends with a line break
    looks like nothing in a file. These show the model what follows it. Half come without their docstring,
    so that code follows a head as often as prose does.
    """
    rng = random.Random(seed)
    documents: list[tuple[str, ...]] = []
    for function in (function for text in library for function in functions(text)):
        text = function.head + (function.bare if rng.random() < 0.5 else function.body)
        if len(text) > _LONGEST_FUNCTION:
            continue
        kind = rng.random()
        cut = len(function.head)
        if kind < 0.3:
            cut = text.index("\n", rng.randrange(len(text))) + 1
        documents.append((text[:cut], text[cut:]) if kind < 0.75 else (text,))
    return documents
