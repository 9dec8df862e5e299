"""What is planned: a model, its draft, how ranks share them, and what requests are expected."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from sglang_k3.models.config import ConfigError, K3Config
from sglang_k3.models.dspark_config import DraftConfig
from sglang_k3.planning.devices import Device
from sglang_k3.planning.errors import PlanError
from sglang_k3.planning.layout import Layout
from sglang_k3.planning.weights import Precision
from sglang_k3.speculative.record_forms import Form

Strategy = Literal["off", "no_buffer", "extra_buffer", "extra_buffer_lazy"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True)
class Deployment:
    """One deployment. form is None without a draft.

    context: tokens of prompt and answer that a request may reach. accept: tokens that a verify step is
    expected to yield. checkpoints, cached_tokens: states and KV tokens that a group of ranks keeps for the
    prefix cache beside those of running requests; checkpoints None: one for each running request. chunk:
    tokens of a prefill step. host: bytes of host memory for the cache, a rank.
    """

    name: str
    config: K3Config
    draft: DraftConfig | None
    form: Form | None
    layout: Layout
    device: Device
    precision: Precision
    context: int
    accept: float
    strategy: Strategy
    checkpoints: int | None
    cached_tokens: int
    page: int
    chunk: int
    host: int

    @property
    def drafted_rows(self) -> int:
        """Rows that a step computes for a request: the anchor and its drafts."""
        return 1 if self.draft is None else self.draft.gamma + 1

    def check(self) -> None:
        """Raises PlanError for values that can't go together, with the remedy."""
        for option, value, least in (
            ("--context", self.context, 1),
            ("--page-size", self.page, 1),
            ("--chunk", self.chunk, 1),
            ("--checkpoints", self.checkpoints or 0, 0),
            ("--cached-tokens", self.cached_tokens, 0),
            ("--host-gib", self.host, 0),
        ):
            if value < least:
                raise PlanError(f"{option} {value} must be at least {least}")
        if self.context > self.config.max_positions:
            raise PlanError(
                f"--context {self.context} is longer than the model's {self.config.max_positions} positions: "
                f"pass {self.config.max_positions} or less"
            )
        if self.strategy == "no_buffer" and self.page != 1:
            raise PlanError(
                f"--cache-strategy no_buffer takes pages of one token, not --page-size {self.page}: pass "
                "--page-size 1, or another strategy"
            )
        if self.strategy == "off" and (self.checkpoints or self.cached_tokens):
            raise PlanError(
                "--cache-strategy off keeps nothing for later: leave out --checkpoints and --cached-tokens"
            )
        if self.draft is None or self.form is None:
            return
        if not 1 <= self.accept <= self.drafted_rows:
            raise PlanError(
                f"--accept-length {self.accept:g}: a step of {self.drafted_rows} rows yields between 1 and "
                f"{self.drafted_rows} tokens"
            )
        if self.form.anchored and self.strategy in ("no_buffer", "extra_buffer"):
            raise PlanError(
                "--records anchored comes with SGLang's lazy strategy, not --cache-strategy "
                f"{self.strategy}: pass extra_buffer_lazy, or another form"
            )
        try:
            self.draft.check_target(
                hidden_size=self.config.hidden_size,
                vocab_size=self.config.vocab_size,
                num_layers=self.config.num_layers,
                max_positions=self.context,
            )
        except ConfigError as error:
            raise PlanError(str(error)) from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint's folder. Raises PlanError where there is none to read."""
    file = folder / "config.json" if folder.is_dir() else folder
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise PlanError(f"{file}: {error.strerror}: pass a folder with a config.json") from error
    except ValueError as error:
        raise PlanError(f"{file} is not JSON ({error}): pass a checkpoint's config.json") from error
    if not isinstance(values, dict):
        raise PlanError(f"{file} is not a JSON object: pass a checkpoint's config.json")
    return values


def parse(model: dict[str, Any], draft: dict[str, Any] | None) -> tuple[K3Config, DraftConfig | None]:
    """Both configs. Raises PlanError for one that can't be served."""
    try:
        return K3Config.from_hf(model), None if draft is None else DraftConfig.from_file(draft)
    except ConfigError as error:
        raise PlanError(str(error)) from error
