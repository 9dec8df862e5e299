"""What a running server's metrics say about its prefix cache (`sglang-k3 cache`)."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass

from sglang_k3.prefix_cache.outcome import REASONS

_PREFIX = "sglang_k3:"


class NoFigures(RuntimeError):
    """The server cannot be asked, or shows nothing of ours; the message holds the remedy."""


@dataclass(frozen=True)
class View:
    """Counters since the server's start, of requests that started; waits: attempts to start one without a
    slot. slots: of one rank, by use; slot_bytes: of one of them.

    kv_usage: share of the KV cache that running requests hold, the state pool left out.
    """

    prompt_tokens: int
    hit_tokens: int
    lost_tokens: dict[str, int]
    waits: int
    skips: int
    slots: dict[str, int]
    slot_bytes: int
    kv_usage: float

    @property
    def hit_share(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def fetch(url: str, timeout_s: float = 10.0) -> str:
    """The text of /metrics. Raises NoFigures."""
    address = f"{url.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(address, timeout=timeout_s) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        raise NoFigures(f"{address} answers {error.code}: start the server with --enable-metrics") from error
    except (OSError, ValueError) as error:
        raise NoFigures(f"nothing answers at {address} ({error}): name the server with --url") from error


def read(text: str) -> View:
    """The figures in Prometheus' text format. Raises NoFigures where ours are missing."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    # Every rank caches the same prefixes: the first one stands for all.
    ours = [s for s in samples if s.name.startswith(_PREFIX) and s.labels.get("tp_rank", "0") == "0"]
    if not any(s.name == f"{_PREFIX}state_slots" for s in ours):
        raise NoFigures(
            "the server shows no figures of a KDA state cache: either no request has come yet, or it "
            "serves another model, or runs with --radix-cache-backend sglang"
        )

    def total(name: str, **labels: str) -> float:
        return sum(s.value for s in ours if s.name == name and labels.items() <= s.labels.items())

    uses = dict.fromkeys(s.labels["use"] for s in ours if s.name == f"{_PREFIX}state_slots")
    return View(
        prompt_tokens=round(total(f"{_PREFIX}prefix_prompt_tokens_total")),
        hit_tokens=round(total(f"{_PREFIX}prefix_hit_tokens_total")),
        lost_tokens={r: round(total(f"{_PREFIX}prefix_lost_tokens_total", reason=r)) for r in REASONS},
        waits=round(total(f"{_PREFIX}slot_waits_total")),
        skips=round(total(f"{_PREFIX}slot_skips_total")),
        slots={use: round(total(f"{_PREFIX}state_slots", use=use)) for use in uses},
        slot_bytes=round(max(s.value for s in ours if s.name == f"{_PREFIX}state_slot_bytes")),
        kv_usage=max((s.value for s in samples if s.name == "sglang:full_token_usage"), default=0.0),
    )
