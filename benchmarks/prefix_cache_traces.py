"""Requests of sessions that share and change their histories: a coding trace, and public trace formats.

A trace is fixed token by token, answers too, so that every policy is asked the same.
"""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from sglang_k3.training.data import Corpus

SESSIONS, TURNS, BRANCHES = 6, 12, 2
FIRST, ADDED, ANSWER = (1500, 3000), (150, 400), (48, 96)
EDITED, ONE_OFF = 0.25, 0.10
ONE_OFF_LENGTH, EDIT_LENGTH = (60, 400), (8, 60)
SEED = 7


class Request(msgspec.Struct, frozen=True):
    """name: which session and turn. prompt, answer: token ids; the answer is what the model writes."""

    name: str
    prompt: list[int]
    answer: list[int]


class Trace(msgspec.Struct, frozen=True):
    """In the order of arrival; each request comes when the one before it was answered."""

    name: str
    source: str
    requests: list[Request]

    @property
    def sha256(self) -> str:
        """Of every token in order."""
        digest = hashlib.sha256()
        for request in self.requests:
            for ids in (request.prompt, request.answer):
                digest.update(len(ids).to_bytes(8, "little"))
                digest.update(array("q", ids).tobytes())
        return digest.hexdigest()

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)


class _Text:
    """Pieces of Python sources, one behind the other, each file once."""

    def __init__(self, tokenizer: Tokenizer, sources: dict[str, str], draw: random.Random) -> None:
        names = sorted(sources)
        draw.shuffle(names)
        self._files = iter(names)
        self._encode = lambda name: tokenizer.encode(sources[name]).ids
        self._rest: list[int] = []

    def take(self, count: int) -> list[int]:
        while len(self._rest) < count:
            self._rest += self._encode(next(self._files))
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken


def coding(tokenizer: Tokenizer, corpus: Corpus, seed: int = SEED) -> Trace:
    """Six coding sessions of twelve turns, their turns in random order.

    A session opens with 1,500 to 3,000 tokens of source. Each turn adds 150 to 400, of which the answer to
    the turn before is 48 to 96. In a quarter of the turns something in the last third of the history was
    edited. Twice a session a branch goes off, as a retry or a helper does: one turn on from where the session
    stood up to four turns ago, and the session goes on without it. One request in ten is a short one of no
    session.
    """
    draw = random.Random(seed)
    text = _Text(tokenizer, corpus.training, draw)
    requests: list[Request] = []
    histories: list[list[list[int]]] = [[] for _ in range(SESSIONS)]
    branches = [sorted(draw.sample(range(2, TURNS), BRANCHES)) for _ in range(SESSIONS)]
    while any(len(history) < TURNS for history in histories):
        if draw.random() < ONE_OFF:
            prompt = text.take(draw.randint(*ONE_OFF_LENGTH))
            requests.append(Request("one-off", prompt, text.take(draw.randint(*ANSWER))))
            continue
        session = draw.choice([number for number in range(SESSIONS) if len(histories[number]) < TURNS])
        past, turn = histories[session], len(histories[session])
        answer = text.take(draw.randint(*ANSWER))
        if turn in branches[session]:
            branches[session].remove(turn)
            history = past[draw.randrange(max(0, turn - 4), turn)]
            prompt = [*history, *text.take(draw.randint(*ADDED) - len(answer))]
            requests.append(Request(f"session {session} branch at turn {turn}", prompt, answer))
            continue
        if not past:
            prompt = text.take(draw.randint(*FIRST))
        else:
            history = past[-1]
            if draw.random() < EDITED:
                at = draw.randrange(len(history) * 2 // 3, len(history))
                history = [*history[:at], *text.take(draw.randint(*EDIT_LENGTH)), *history[at + 20 :]]
            prompt = [*history, *text.take(draw.randint(*ADDED) - len(answer))]
        requests.append(Request(f"session {session} turn {turn}", prompt, answer))
        past.append([*prompt, *answer])
    return Trace("coding", f"Python's standard library, seed {seed}", requests)


def agentic(path: Path, template: Any, text: Tokenizer, fill: Corpus, most: int = 16_000) -> Trace:
    """A trace in bench_serving's `agentic-trace` format: conversations of turns, each with its new messages.

    template: a transformers tokenizer with a chat template. Answers, which the format leaves to the model,
    are source text. Turns of different conversations come in turn, a conversation starting with every second
    request. A conversation ends where its prompt passes `most` tokens.
    """
    conversations = json.loads(path.read_text())["conversations"]
    draw = random.Random(SEED)
    source = _Text(text, fill.training, draw)
    requests: list[Request] = []
    waiting, open_ones = list(enumerate(conversations)), []
    while waiting or open_ones:
        if waiting and (not open_ones or (len(open_ones) < SESSIONS and len(requests) % 2 == 0)):
            number, turns = waiting.pop(0)
            open_ones.append((number, iter(enumerate(turns)), []))
        index = draw.randrange(len(open_ones))
        number, turns, messages = open_ones[index]
        turn, new = next(turns, (0, None))
        if new is None:
            open_ones.pop(index)
            continue
        messages.extend(new["messages"])
        prompt = template.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        if len(prompt) > most:
            open_ones.pop(index)
            continue
        answer = source.take(draw.randint(*ANSWER))
        requests.append(Request(f"conversation {number} turn {turn}", list(prompt), answer))
        messages.append({"role": "assistant", "content": text.decode(answer)})
    return Trace("agentic", path.name, requests)


def mooncake(path: Path, vocabulary: int, block: int = 512, most: int = 16_000) -> Trace:
    """A trace in bench_serving's `mooncake` format: a request a line, its prompt as hashes of blocks.

    Each hash stands for a block of tokens of its own; a prompt longer than `most` tokens is cut there.
    """
    requests = []
    for number, line in enumerate(filter(None, path.read_text().splitlines())):
        record = json.loads(line)
        ids: list[int] = []
        for one in record["hash_ids"]:
            draw = random.Random(one)
            ids += [draw.randrange(vocabulary) for _ in range(block)]
        draw = random.Random(-1 - number)
        answer = [draw.randrange(vocabulary) for _ in range(min(ANSWER[1], max(1, record["output_length"])))]
        requests.append(Request(f"line {number}", ids[: min(most, record["input_length"])], answer))
    return Trace("mooncake", path.name, requests)


def write_agentic(path: Path, corpus: Corpus, conversations: int = 14, seed: int = SEED) -> None:
    """A file in the `agentic-trace` format: agents of one system prompt that read files and are answered.

    Made from Python's own sources; no recorded conversation is in it.
    """
    draw = random.Random(seed)
    names = sorted(corpus.held_out)
    system = "You mend Python programs. Use these tools.\n" + "\n".join(
        f"- {name}: {corpus.held_out[name].strip().splitlines()[0][:60]}" for name in names[:24]
    )
    made = []
    for _ in range(conversations):
        turns = []
        for turn in range(draw.randint(4, 12)):
            body = corpus.held_out[draw.choice(names)]
            start = draw.randrange(max(1, len(body) - 2000))
            piece = body[start : start + (draw.randint(1500, 4000) if turn == 0 else draw.randint(250, 900))]
            asked = {"role": "user", "content": ("Look at this:\n" if turn == 0 else "It printed:\n") + piece}
            opening = [{"role": "system", "content": system}] if turn == 0 else []
            turns.append({"messages": [*opening, asked], "prompt_tokens": 0})
        made.append(turns)
    path.write_text(json.dumps({"metadata": {"seed": seed}, "conversations": made}, indent=1) + "\n")
