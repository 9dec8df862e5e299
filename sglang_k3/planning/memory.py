"""Bytes of one rank, by what they are for, and how many requests fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_k3.models.hf_config import K3CacheParams, state_params
from sglang_k3.planning.deployment import Deployment
from sglang_k3.planning.weights import DRAFT, draft_weights, weights

MLA_PAGES, DRAFT_PAGES = "MLA pages", "draft pages"
STATES, CHECKPOINTS, RECORDS = "state slots", "checkpoints", "replay records"
TABLE, WORK, COMMUNICATION = "token table", "working memory", "communication buffers"
_TOKEN = torch.int32.itemsize
_TABLE_MARGIN = 4
"""Tokens that SGLang's table of a request has beyond the context, drafted rows apart."""


@dataclass(frozen=True)
class Pools:
    """What SGLang's pools are asked for: the counts of one rank's group.

    requests: running ones. slots: states, the padding slot apart. tokens: of the KV pool, its padding page
    apart.
    """

    requests: int
    slots: int
    checkpoints: int
    slots_per_request: int
    tokens: int


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. weights: by module. pools: MLA_PAGES to TABLE. other: estimates."""

    counts: Pools
    weights: dict[str, int]
    pools: dict[str, int]
    other: dict[str, int]

    @property
    def static(self) -> int:
        """What --mem-fraction-static counts: weights and pools."""
        return sum(self.weights.values()) + sum(self.pools.values())

    @property
    def total(self) -> int:
        return self.static + sum(self.other.values())


def cache_params(deployment: Deployment) -> K3CacheParams:
    """The state of a request on one rank, as the server's pools are built from it."""
    from sglang.srt.configs.mamba_utils import Mamba2StateDType

    config, precision = deployment.config, deployment.precision
    return state_params(
        heads=config.kda.num_heads,
        head_dim=config.kda.head_dim,
        conv_kernel=config.kda.conv_kernel_size,
        layers=list(config.kda_layers),
        ranks=deployment.layout.attention,
        dtype=Mamba2StateDType(conv=precision.dtype, temporal=precision.state),
    )


def kv_bytes(deployment: Deployment) -> int:
    """Of one token over all MLA layers; every rank of a group keeps it whole."""
    config = deployment.config
    return config.mla.cache_width * len(config.mla_layers) * deployment.precision.kv_bytes


def draft_kv_bytes(deployment: Deployment) -> int:
    """Of one token over the draft's layers, on one rank."""
    draft = deployment.draft
    if draft is None:
        return 0
    width = draft.cache_width // deployment.layout.draft
    return width * draft.num_layers * deployment.precision.dtype.itemsize


def slots_per_request(deployment: Deployment) -> int:
    """State slots that SGLang sets aside for a running request, under overlap scheduling.

    no_buffer runs without it and has no tracking slots in either case.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_mamba_tracking_slots
    from sglang.srt.mem_cache.kv_cache_configurator import MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO

    from sglang_k3.speculative.state_pool import ANCHORED_SLOTS

    if deployment.strategy == "off":
        return 1
    if deployment.form is not None and deployment.form.anchored:
        return ANCHORED_SLOTS
    return MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO + get_mamba_tracking_slots(
        extra_buffer=deployment.strategy != "no_buffer",
        overlap=True,
        lazy=deployment.strategy == "extra_buffer_lazy",
    )


def memory(deployment: Deployment, concurrency: int) -> Memory:
    """Of `concurrency` running requests in all, spread evenly over the groups of ranks."""
    config, layout, precision = deployment.config, deployment.layout, deployment.precision
    requests = layout.requests(concurrency, layout.mla)
    each = slots_per_request(deployment)
    checkpoints = deployment.checkpoints
    if checkpoints is None:
        checkpoints = 0 if deployment.strategy == "off" else requests
    # A step may write all its rows before any is accepted.
    longest = deployment.context + (deployment.drafted_rows if deployment.draft else 0)
    pages = requests * -(-longest // deployment.page) + -(-deployment.cached_tokens // deployment.page)
    counts = Pools(requests, requests * each + checkpoints, checkpoints, each, pages * deployment.page)

    held = {module.name: round(module.size) for module in weights(config, layout, precision).values()}
    if deployment.draft is not None:
        held[DRAFT] = round(draft_weights(deployment.draft, layout, precision.dtype).size)

    params = cache_params(deployment)
    state, kv_slots = params.mamba_cache_per_req, counts.tokens + deployment.page
    pools = {
        MLA_PAGES: kv_slots * kv_bytes(deployment),
        STATES: (requests * each + 1) * state,
        CHECKPOINTS: checkpoints * state,
        TABLE: (requests + 1) * (deployment.context + _TABLE_MARGIN) * _TOKEN,
    }
    if deployment.draft is not None and deployment.form is not None:
        from sglang_k3.speculative.replay_records import bank_bytes

        rows = deployment.drafted_rows
        pools[DRAFT_PAGES] = kv_slots * draft_kv_bytes(deployment)
        pools[RECORDS] = bank_bytes(params, rows, deployment.form, requests, deployment.device.kind)[0]
        pools[TABLE] += (requests + 1) * rows * _TOKEN
    return Memory(counts, held, pools, _other(deployment, requests))


def largest(deployment: Deployment) -> int:
    """The most running requests that fit, a multiple of the groups; 0 where none does."""
    layout = deployment.layout
    step = layout.ranks // layout.mla

    def fits(groups_of_requests: int) -> bool:
        return memory(deployment, groups_of_requests * step).total <= room(deployment)

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 1 << 20:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


def room(deployment: Deployment) -> int:
    """Bytes of a device that a rank may use. The ranks of a CPU share the machine's memory."""
    device = deployment.device
    sharing = deployment.layout.ranks if device.kind == "cpu" else 1
    return (device.memory - device.reserve) // sharing


def _other(deployment: Deployment, requests: int) -> dict[str, int]:
    """Estimates: no pool of SGLang's, but what steps need while they run."""
    config, layout, item = deployment.config, deployment.layout, deployment.precision.dtype.itemsize
    hidden = config.hidden_size
    heads = max(
        4 * config.kda.projection_size // layout.attention,
        config.mla.num_heads * (config.mla.cache_width + config.mla.qk_head_dim) // layout.attention,
    )
    mlp = 2 * config.intermediate_size // layout.mlp
    routed = 0
    if config.moe is not None:
        routed = config.moe.top_k * (config.expert_size + 3 * config.moe.intermediate_size)
        routed //= layout.experts * layout.expert_rows
    # The bank of residual blocks, the stream and its norms, and the widest of the sub-layers.
    numbers = hidden * (len(config.block_starts) + 6) + max(heads, mlp, routed)
    rows = requests * deployment.drafted_rows
    logits = 2 * rows * config.vocab_size * torch.float32.itemsize
    groups = sum(sharing > 1 for sharing in {layout.ranks, layout.attention, layout.experts})
    return {
        WORK: deployment.chunk * numbers * item + logits,
        COMMUNICATION: groups * deployment.device.communicator,
    }
