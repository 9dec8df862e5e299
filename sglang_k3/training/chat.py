"""K3's chat layout as a Jinja template, for the tokenizer and for the training samples alike.

K3 itself renders in Python, and encodes user text without special tokens. A template can't, so it breaks
up special tokens in what callers send by a blank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

CHANNEL_WORDS = ("message", "think", "response", "tools", "call", "argument", "assistant", "user", "system")
"""Words of the layout that stand right behind <|open|> and <|close|> or in a role."""

CHAT_TEMPLATE = """\
{%- macro text(value) -%}
{{ value | replace("<|", "< |") | replace("[BOS]", "[ BOS]") | replace("[EOS]", "[ EOS]") \
| replace("[EOT]", "[ EOT]") }}
{%- endmacro -%}
{%- macro attribute(value) -%}
{{ text(value) | replace("&", "&amp;") | replace('"', "&quot;") }}
{%- endmacro -%}
{%- macro body(content) -%}
{%- if content is string -%}
{{ text(content) }}
{%- elif content -%}
{%- for part in content -%}{%- if part.text is defined -%}{{ text(part.text) }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro close() -%}
<|close|>message<|sep|><|end_of_msg|>
{%- endmacro -%}
{%- macro call(item, index) -%}
{%- set function = item.function if item.function is defined else item -%}
{{ '<|open|>call tool="' }}{{ attribute(function.name) }}{{ '" index="' }}{{ index }}{{ '"<|sep|>' }}
{%- if function.arguments is mapping -%}
{%- for key, value in function.arguments.items() -%}
{{ '<|open|>argument key="' }}{{ attribute(key) }}{{ '" type="' -}}
{%- if value is string -%}
{{ 'string"<|sep|>' }}{{ text(value) }}
{%- else -%}
{%- set type = "null" if value is none else "boolean" if value is boolean else "number" if value is number \
else "object" if value is mapping else "array" -%}
{{ type }}{{ '"<|sep|>' }}{{ text(value | tojson) }}
{%- endif -%}
<|close|>argument<|sep|>
{%- endfor -%}
{%- endif -%}
<|close|>call<|sep|>
{%- endmacro -%}
{%- set thinks = thinking if thinking is defined and thinking is not none else true -%}
{%- if thinks -%}
{{ '<|open|>message role="system" type="thinking-effort"<|sep|>thinking_effort=' }}
{{- thinking_effort | default("max", true) }}{{ close() }}
{%- endif -%}
{%- if tools -%}
{{ '<|open|>message role="system" type="tool-declare"<|sep|># Tools\\n' }}
{{- text(tools | tojson(separators=(",", ":"), sort_keys=true)) }}{{ close() }}
{%- endif -%}
{%- set ns = namespace(calls=[], results=0) -%}
{%- for message in messages -%}
{%- if message.role == "assistant" -%}
{%- set ns.calls = message.tool_calls or [] -%}
{%- set ns.results = 0 -%}
{{ '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>' }}
{{- text(message.reasoning_content or message.reasoning or "") }}
{{- '<|close|>think<|sep|><|open|>response<|sep|>' }}{{ body(message.content) }}<|close|>response<|sep|>
{%- if message.tool_calls -%}
<|open|>tools<|sep|>
{%- for item in message.tool_calls -%}{{ call(item, loop.index) }}{%- endfor -%}
<|close|>tools<|sep|>
{%- endif -%}
{{ close() }}
{%- elif message.role == "tool" -%}
{%- set ns.results = ns.results + 1 -%}
{%- set item = ns.calls[ns.results - 1] if ns.results <= ns.calls | length else {} -%}
{%- set function = item.function if item.function is defined else item -%}
{{ '<|open|>message role="tool" tool="' }}{{ attribute(message.name or function.name or "") -}}
{{ '" index="' }}{{ ns.results }}{{ '"' -}}
<|sep|>{{ body(message.content) }}{{ close() }}
{%- else -%}
{{ '<|open|>message role="' }}{{ attribute(message.role) }}{{ '"<|sep|>' }}
{{- body(message.content) }}{{ close() }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|open|>message role="assistant"<|sep|><|open|>' }}{{ "think" if thinks else "response" }}<|sep|>
{%- endif -%}
"""


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    add_generation_prompt: bool = False,
) -> str:
    """The text of a conversation, as the tokenizer's own `apply_chat_template` gives it."""
    return _template().render(
        messages=messages,
        tools=tools,
        thinking=thinking,
        add_generation_prompt=add_generation_prompt,
    )


@cache
def _template() -> Template:
    # The settings and the filter that transformers gives a chat template.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    return environment.from_string(CHAT_TEMPLATE)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
