"""Chat completions of the trained checkpoint, and K3's channels through the server's own parsers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

from sglang_k3.training import tokenizer as bpe
from tests.server.conftest import TINY, Model
from tests.server.harness import Server
from tests.server.script import Script, byte_by_byte

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
        },
    }
    for name in ("find_function", "run_tests")
]


def call(name: str, index: int, *arguments: tuple[str, str, str]) -> str:
    inside = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, kind, value in arguments
    )
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{inside}<|close|>call<|sep|>'


def response(text: str) -> str:
    return f"<|open|>response<|sep|>{text}<|close|>response<|sep|>"


def tools(*calls: str) -> str:
    return f"<|open|>tools<|sep|>{''.join(calls)}<|close|>tools<|sep|>"


THINK_END = "<|close|>think<|sep|>"
MESSAGE_END = "<|close|>message<|sep|><|end_of_msg|>"


@dataclass
class Parsed:
    """What a client reads: reasoning, content, and tool calls as (name, arguments)."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)


# What the model says behind the opened think channel, and what a client has to read.
SPOKEN: dict[str, tuple[str, Parsed]] = {
    "reasoning and an answer": (
        "The user greets." + THINK_END + response("Hello!") + MESSAGE_END,
        Parsed("The user greets.", "Hello!"),
    ),
    "no reasoning": (THINK_END + response("Hello!") + MESSAGE_END, Parsed("", "Hello!")),
    "bytes of several languages": (
        "größer als 雪 🐍" + THINK_END + response("naïve 雪🐍 Ω") + MESSAGE_END,
        Parsed("größer als 雪 🐍", "naïve 雪🐍 Ω"),
    ),
    "text like markers": (
        "a < b, x <| y, <open>" + THINK_END + response("1 <| 2 |> 3 <|ope <close|>") + MESSAGE_END,
        Parsed("a < b, x <| y, <open>", "1 <| 2 |> 3 <|ope <close|>"),
    ),
    "one tool call": (
        "I search."
        + THINK_END
        + response("")
        + tools(call("find_function", 1, ("name", "string", "parse"), ("depth", "number", "2")))
        + MESSAGE_END,
        Parsed("I search.", "", [("find_function", {"name": "parse", "depth": 2})]),
    ),
    "an answer and two calls": (
        "Both."
        + THINK_END
        + response("I do both.")
        + tools(
            call("find_function", 1, ("name", "string", 'say "hi" & <go>')),
            call("run_tests", 2, ("name", "string", "été"), ("flags", "array", '["-x", null]')),
        )
        + MESSAGE_END,
        Parsed(
            "Both.",
            "I do both.",
            [
                ("find_function", {"name": 'say "hi" & <go>'}),
                ("run_tests", {"name": "été", "flags": ["-x", None]}),
            ],
        ),
    ),
    "tools straight behind the reasoning": (
        "Now." + THINK_END + tools(call("run_tests", 1)) + MESSAGE_END,
        Parsed("Now.", "", [("run_tests", {})]),
    ),
}


@pytest.fixture(scope="module")
def server(trained_k3: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--max-total-tokens", "16384", "--max-mamba-cache-size", "40")
    flags += ("--enable-custom-logit-processor", "--enable-cache-report")
    flags += ("--reasoning-parser", "kimi_k3", "--tool-call-parser", "kimi_k3")
    with Server(trained_k3.path, tmp_path_factory.mktemp("chat") / "log", *flags) as running:
        yield running


def body(**further: Any) -> dict[str, Any]:
    return {
        "model": "k3",
        "messages": [{"role": "user", "content": "Where is `parse` defined?"}],
        "temperature": 0,
        **further,
    }


def scripted(text: str) -> dict[str, Any]:
    """Body of a request whose answer is `text`, a byte or a special token at each step."""
    ids = byte_by_byte(bpe.load(TINY), text)
    return body(
        tools=TOOLS,
        max_tokens=len(ids),
        custom_logit_processor=Script.to_str(),
        custom_params={"script": ids},
    )


def read(message: dict[str, Any]) -> Parsed:
    calls = [
        (item["function"]["name"], json.loads(item["function"]["arguments"]))
        for item in message.get("tool_calls") or []
    ]
    return Parsed(message.get("reasoning_content") or "", message.get("content") or "", calls)


def whole(server: Server, wanted: dict[str, Any]) -> tuple[Parsed, str]:
    """Non-streaming answer and finish reason."""
    answer = server.post("/v1/chat/completions", wanted)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return read(choice["message"]), choice["finish_reason"]


def streamed(server: Server, wanted: dict[str, Any]) -> tuple[Parsed, str, int]:
    """The streamed answer put together, its finish reason, and the number of pieces."""
    message: dict[str, Any] = {"reasoning_content": "", "content": ""}
    calls: dict[int, dict[str, str]] = {}
    finish, pieces = "", 0
    url = f"{server.url}/v1/chat/completions"
    with requests.post(url, json={**wanted, "stream": True}, stream=True, timeout=300) as answer:
        assert answer.status_code == 200, answer.text
        for line in answer.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                delta = choice["delta"]
                pieces += 1
                for key in message:
                    message[key] += delta.get(key) or ""
                for item in delta.get("tool_calls") or []:
                    known = calls.setdefault(item["index"], {"name": "", "arguments": ""})
                    for key in known:
                        known[key] += item["function"].get(key) or ""
                finish = choice["finish_reason"] or finish
    message["tool_calls"] = [{"function": calls[index]} for index in sorted(calls)]
    return read(message), finish, pieces


def test_the_model_thinks_and_answers(server: Server) -> None:
    wanted = body(max_tokens=200)
    wanted["messages"][0]["content"] = "Write a Python function close: Close the file."
    parsed, _ = whole(server, wanted)
    print(parsed)
    assert parsed.reasoning.strip() and parsed.content.strip()
    assert streamed(server, wanted)[0] == parsed


def test_a_second_turn_finds_the_first_in_the_prefix_cache(server: Server) -> None:
    messages = [{"role": "user", "content": "What does this function do?\n" + "x = x + 1\n" * 60}]
    first = server.post("/v1/chat/completions", body(messages=messages, max_tokens=8)).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "Thank you."}]
    usage = server.post("/v1/chat/completions", body(messages=messages, max_tokens=8)).json()["usage"]
    # The part behind the last user turn is the first answer's; all in front of it was computed before.
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 64


@pytest.mark.parametrize("name", SPOKEN)
def test_channels_are_parsed_and_a_stream_of_bytes_gives_the_same(server: Server, name: str) -> None:
    text, expected = SPOKEN[name]
    wanted = scripted(text)
    parsed, finish = whole(server, wanted)
    assert parsed == expected
    assert finish == ("tool_calls" if expected.calls else "stop")
    again, finish_again, pieces = streamed(server, wanted)
    assert again == expected and finish_again == finish
    assert pieces > len(expected.reasoning + expected.content) / 2, "the stream came in a few large pieces"


def test_without_thinking_the_answer_comes_at_once(server: Server) -> None:
    wanted = scripted("Hello!<|close|>response<|sep|>" + MESSAGE_END)
    wanted["chat_template_kwargs"] = {"thinking": False}
    expected = Parsed("", "Hello!")
    assert whole(server, wanted)[0] == expected
    assert streamed(server, wanted)[0] == expected


def test_requests_side_by_side_keep_their_own_texts(server: Server) -> None:
    from concurrent.futures import ThreadPoolExecutor

    texts = [text for text, _ in SPOKEN.values()]
    with ThreadPoolExecutor(len(texts)) as pool:
        parsed = list(pool.map(lambda text: streamed(server, scripted(text))[0], texts))
    assert parsed == [expected for _, expected in SPOKEN.values()]


def in_pieces(pieces: list[str]) -> Parsed:
    """The server's two parsers, fed one piece after the other as its stream does."""
    reasoner = ReasoningParser("kimi_k3", stream_reasoning=True, force_reasoning=True)
    caller = FunctionCallParser(
        [Tool(type="function", function=Function(**t["function"])) for t in TOOLS], "kimi_k3"
    )
    parsed = Parsed()
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        thought, text = reasoner.parse_stream_chunk(piece)
        parsed.reasoning += thought or ""
        content, items = caller.parse_stream_chunk(text or "")
        parsed.content += content
        for item in items:
            entry = arguments.setdefault(item.tool_index, ["", ""])
            entry[0] += item.name or ""
            entry[1] += item.parameters
    parsed.calls = [(name, json.loads(raw)) for name, raw in (arguments[i] for i in sorted(arguments))]
    return parsed


@pytest.mark.parametrize("name", SPOKEN)
def test_every_split_in_two_parses_alike(name: str) -> None:
    text, expected = SPOKEN[name]
    text = text.removesuffix("<|end_of_msg|>")  # the server stops there and shows none of it
    for cut in range(len(text) + 1):
        assert in_pieces([text[:cut], text[cut:]]) == expected, f"split behind {text[:cut]!r}"
    assert in_pieces(list(text)) == expected
