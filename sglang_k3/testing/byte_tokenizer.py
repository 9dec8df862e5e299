"""A tokenizer that needs no download: the 256 bytes, then K3's special tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = (
    "[BOS]",
    "[EOS]",
    "<|end_of_msg|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "[start_header_id]",
    "[end_header_id]",
    "[EOT]",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "[UNK]",
    "[PAD]",
)
"""In the order of their ids, from 256 on."""

# K3's parsers read these from the decoded text, so they survive skip_special_tokens.
_KEPT_IN_TEXT = ("<|open|>", "<|close|>", "<|sep|>")


# K3's message layout, without thinking or tools.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|open|>message role="{{ message.role }}"<|sep|>
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}{{ part.text if part.type == "text" else "" }}{%- endfor -%}
{%- endif -%}
<|close|>message<|sep|><|end_of_msg|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|open|>message role="assistant"<|sep|>{%- endif -%}
"""


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; ids from 0 to vocab_size - 1 all decode.

    vocab_size: at least 256 + len(SPECIAL_TOKENS). Raises ValueError below that.
    """
    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size={vocab_size} has no room for the bytes and the special tokens")
    vocabulary = {character: byte for byte, character in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_token_{i}|>" for i in range(256 + len(SPECIAL_TOKENS), vocab_size)]
    tokenizer.add_tokens(
        [
            AddedToken(token, special=token not in _KEPT_IN_TEXT, normalized=False)
            for token in (*SPECIAL_TOKENS, *reserved)
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "<|end_of_msg|>",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each byte, by byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    characters = {byte: chr(byte) for byte in shown}
    characters |= {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [characters[byte] for byte in range(256)]
