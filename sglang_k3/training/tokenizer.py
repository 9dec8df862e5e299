"""Byte-level BPE with K3's special tokens, learnt from the corpus."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sglang_k3.testing.byte_tokenizer import SPECIAL_TOKENS
from sglang_k3.training.chat import CHANNEL_WORDS, CHAT_TEMPLATE

VOCABULARY = 2048
"""Tokens in all; the special ones are the last, as in K3."""

# K3's parsers read these from the decoded text, so they survive skip_special_tokens.
_KEPT_IN_TEXT = ("<|open|>", "<|close|>", "<|sep|>")

# A line break keeps its indentation, a word its leading blank; digits come one by one.
_PIECES = r"\r?\n[ \t]*| ?\p{L}+| ?_+|\d| ?[^\s\p{L}\d_]+|\s+"

# How often each word of the chat layout counts while merges are learnt, so that it becomes one token.
_CHANNEL_WEIGHT = 3000


def token_id(token: str) -> int:
    """The id of a special token. Raises ValueError for any other."""
    return VOCABULARY - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index(token)


TOKEN_IDS = {
    "bos_token_id": token_id("[BOS]"),
    "eos_token_id": token_id("<|end_of_msg|>"),
    "pad_token_id": token_id("[PAD]"),
}


def learn(texts: Iterable[str]) -> Tokenizer:
    """Learn merges from texts until the vocabulary is full.

    Raises ValueError where the texts are too few for that: an embedding row without a token would
    decode to nothing.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    ordinary = VOCABULARY - len(SPECIAL_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=ordinary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=24,
    )
    words = [word for word in CHANNEL_WORDS for _ in range(_CHANNEL_WEIGHT)]
    tokenizer.train_from_iterator([*texts, *words], trainer)
    if tokenizer.get_vocab_size() != ordinary:
        raise ValueError(f"the texts give {tokenizer.get_vocab_size()} tokens, not {ordinary}: add text")
    tokenizer.add_tokens(
        [AddedToken(token, special=token not in _KEPT_IN_TEXT, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "<|end_of_msg|>",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def load(directory: Path) -> Tokenizer:
    """Read a tokenizer that `save` wrote."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
