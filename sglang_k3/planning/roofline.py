"""The time of one decode step, by part: bytes over bandwidth, products over peak, and fixed costs.

An estimate: kernels reach neither peak, parts may overlap, and routing is taken as uniform. What published
figures have beyond it is shown beside it as not attributed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_k3.planning.deployment import Deployment
from sglang_k3.planning.memory import cache_params, draft_kv_bytes, kv_bytes
from sglang_k3.planning.weights import (
    VOCABULARY,
    draft_weights,
    expert_bytes,
    expert_numbers,
    vocabulary_rows,
    weights,
)
from sglang_k3.speculative.record_forms import BOUNDARY, Form

WEIGHTS, EXPERTS, STATE, CACHE = "weights", "experts", "state and records", "MLA cache"
DRAFT, COMMUNICATION, LAUNCHES = "draft", "communication", "launches"

OPERATORS = {"KDA": 10, "MLA": 17, "MLP or experts": 14, "draft layer": 15}
"""Operators that a sub-layer launches, counted in the forward of models/ and moe/ with its residual read."""


@dataclass(frozen=True)
class Step:
    """Seconds of one step by part; tokens: that it yields for each request; rows: that it computes in all.

    distinct: experts of a layer that some row chooses, expected over all ranks.
    """

    seconds: dict[str, float]
    tokens: float
    rows: int
    distinct: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def tpot(self) -> float:
        """Seconds an output token."""
        return self.total / self.tokens


def distinct_experts(experts: int, top_k: int, rows: float) -> float:
    """Expected number of experts that `rows` rows choose, each `top_k` different ones, uniformly."""
    return experts * (1 - (1 - top_k / experts) ** rows)


def state_passes(form: Form | None, rows: int, accept: float) -> float:
    """How often a state is read or written in a step of `rows` rows that yields `accept` tokens.

    Plain decode reads and writes it. A verify reads it; commits, folds and crossed boundaries read or write
    it as record_forms.py says.
    """
    if form is None:
        return 2.0
    if form.anchored:
        return 1 + 2 * accept / BOUNDARY
    if form.at_once:
        return 3.0
    return 1 + 1 / _steps_between_folds(form, rows, accept)


def tail_rows(form: Form | None, rows: int, accept: float) -> float:
    """Rows of records that a step reads on average: the tail of its verify, or what its commit takes."""
    if form is None:
        return 0.0
    if form.anchored:
        return (BOUNDARY - 1) / 2
    if form.at_once:
        return accept
    steps = _steps_between_folds(form, rows, accept)
    return accept * (steps + 1) / 2


def _steps_between_folds(form: Form, rows: int, accept: float) -> int:
    # A verify behind a tail t writes the state where t + 2 rows > ring.
    return math.floor((form.ring(rows) - 2 * rows) / accept) + 1


def step(deployment: Deployment, concurrency: int, context: int) -> Step:
    """One decode step of `concurrency` requests with so many tokens each behind them."""
    config, layout, device = deployment.config, deployment.layout, deployment.device
    precision, form, accept = deployment.precision, deployment.form, deployment.accept
    each = deployment.drafted_rows
    rows = concurrency * each

    def longer(size: float, products: float = 0.0) -> float:
        return max(size / device.bandwidth, 2 * products / device.flops)

    modules = weights(config, layout, precision)
    dense = sum(
        longer(module.read, module.products * layout.rows(rows, module.sharing))
        for module in modules.values()
    )
    experts = distinct = 0.0
    if config.moe is not None:
        share, layers = layout.experts * layout.expert_rows, len(config.moe_layers)
        distinct = distinct_experts(config.moe.num_experts, config.moe.top_k, rows)
        experts = layers * longer(
            distinct / share * expert_bytes(config, precision),
            rows * config.moe.top_k / share * expert_numbers(config),
        )

    here = layout.requests(concurrency, layout.attention)
    params = cache_params(deployment)
    state = here * state_passes(form, each, accept) * params.mamba_cache_per_req
    if form is not None:
        from sglang_k3.speculative.replay_records import fields_of

        record = sum(field.bytes for field in fields_of(params, device.kind)) * len(params.layers)
        state += here * record * (each + tail_rows(form, each, accept))

    cached = layout.requests(concurrency, layout.mla) * context * kv_bytes(deployment)
    draft = 0.0
    if deployment.draft is not None:
        module = draft_weights(deployment.draft, layout, precision.dtype)
        drafted = concurrency * deployment.draft.gamma
        table = vocabulary_rows(config.vocab_size, layout.head) * config.hidden_size
        head = table * precision.bits(VOCABULARY, None, 2) / 8
        draft = (
            longer(module.read, module.products * layout.rows(drafted, layout.draft))
            + longer(head, table * layout.rows(drafted, layout.head))
            + layout.requests(concurrency, layout.draft)
            * context
            * draft_kv_bytes(deployment)
            / device.bandwidth
        )
    seconds = {
        WEIGHTS: dense,
        EXPERTS: experts,
        STATE: state / device.bandwidth,
        CACHE: cached / device.bandwidth,
        DRAFT: draft,
        COMMUNICATION: _communication(deployment, rows),
        LAUNCHES: _launches(deployment) * device.launch,
    }
    return Step(seconds, accept if deployment.draft else 1.0, rows, distinct)


def _communication(deployment: Deployment, rows: int) -> float:
    """A sum over the ranks behind each sub-layer, the routed experts and the shared ones apart."""
    config, layout, device = deployment.config, deployment.layout, deployment.device
    if layout.ranks == 1:
        return 0.0
    item = deployment.precision.dtype.itemsize
    group = layout.rows(rows, layout.attention)
    moe = len(config.moe_layers)
    widths = [
        (config.num_layers, group * config.hidden_size),
        (config.num_layers - moe, rows * config.hidden_size),
    ]
    if config.moe is not None:
        widths.append((moe, rows * config.expert_size))
        if config.moe.num_shared_experts:
            widths.append((moe, rows * config.hidden_size))
    # Embedding, and the logits of every row, which go one way.
    widths += [(1, rows * config.hidden_size), (1, group * config.vocab_size / 2)]
    if deployment.draft is not None:
        drafted = group / deployment.drafted_rows * deployment.draft.gamma
        widths += [(2 * deployment.draft.num_layers, drafted * config.hidden_size)]
    # A sum sends a rank's part away and takes the others' back.
    way = 2 * (layout.ranks - 1) / layout.ranks
    return sum(count * (device.collective + way * width * item / device.link) for count, width in widths)


def _launches(deployment: Deployment) -> int:
    config = deployment.config
    count = len(config.kda_layers) * OPERATORS["KDA"]
    count += len(config.mla_layers) * OPERATORS["MLA"]
    count += config.num_layers * OPERATORS["MLP or experts"]
    if deployment.draft is not None:
        count += deployment.draft.num_layers * OPERATORS["draft layer"]
    return count
