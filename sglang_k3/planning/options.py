"""What a caller may say of a deployment, with the command's defaults, and the plan for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_k3.planning.errors import PlanError

if TYPE_CHECKING:
    from sglang_k3.planning.report import Plan

PRESET = "kimi-k3"
"""Kimi K3 itself, and RadixArk's draft for it."""


@dataclass(frozen=True)
class Options:
    """The command's options, by their names; its help says what they mean. None: what fits the others."""

    device: str
    tp: int = 1
    dp: int = 1
    ep: int = 1
    model_path: Path | None = None
    context: int = 131072
    concurrency: int | None = None
    draft: str = "none"
    records: str | None = None
    accept_length: float = 4.0
    cache_strategy: str | None = None
    checkpoints: int | None = None
    cached_tokens: int = 0
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    kv_dtype: str = "auto"
    experts: str = "checkpoint"
    page_size: int | None = None
    chunk: int = 8192
    host_gib: float = 0.0
    memory_gib: float | None = None
    bandwidth: float | None = None
    tflops: float | None = None
    link: float | None = None
    launch_us: float | None = None
    collective_us: float | None = None


def make(options: Options) -> Plan:
    """Raises PlanError for a deployment that can't be planned."""
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise PlanError(
                f"--{field.name.replace('_', '-')} {value} is not a number: pass one, or leave it out"
            )
    try:
        import sglang  # noqa: F401
        import torch
    except ImportError as error:
        raise PlanError(
            f"the planner takes shapes from the server's own code, and {error.name} is not installed: "
            "install sglang-k3[cpu], here or on another machine"
        ) from error

    from sglang_k3.models.presets import real_draft_config, real_k3_config
    from sglang_k3.planning.deployment import STRATEGIES, Deployment, Strategy, parse, read_config
    from sglang_k3.planning.devices import GIB
    from sglang_k3.planning.devices import device as find
    from sglang_k3.planning.layout import sglang_layout
    from sglang_k3.planning.report import plan as compute
    from sglang_k3.planning.weights import EXPERT_FORMATS, ExpertFormat, Precision
    from sglang_k3.speculative.record_forms import DEFAULT, DEFAULT_ON_NPU, FORMS

    model_path, draft_name = options.model_path, options.draft
    ready = find(
        options.device,
        memory_gib=options.memory_gib,
        bandwidth=options.bandwidth,
        tflops=options.tflops,
        link=options.link,
        launch_us=options.launch_us,
        collective_us=options.collective_us,
    )
    drafts = {"none": lambda: None, PRESET: real_draft_config}
    model, draft = parse(
        real_k3_config() if model_path is None else read_config(model_path),
        drafts.get(draft_name, lambda: read_config(Path(draft_name)))(),
    )
    form = None
    records, wanted = options.records, options.cache_strategy
    if draft is not None:
        records = records or (DEFAULT_ON_NPU if ready.kind == "npu" else DEFAULT)
        form = FORMS[_chosen("--records", records, FORMS)]
    elif records is not None:
        raise PlanError(f"--records {records} is of a server that speculates: add --draft, or leave it out")
    if wanted is None:
        wanted = "extra_buffer_lazy" if form is not None and form.anchored else "extra_buffer"
    strategies: dict[str, Strategy] = {name: name for name in STRATEGIES}
    strategy = strategies[_chosen("--cache-strategy", wanted, strategies)]
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    dtype = dtypes[_chosen("--dtype", options.dtype, dtypes)]
    kv = {"auto": dtype.itemsize, "fp8": 1}
    formats: dict[str, ExpertFormat] = {name: name for name in EXPERT_FORMATS}
    precision = Precision(
        dtype=dtype,
        state=dtypes[_chosen("--state-dtype", options.state_dtype, dtypes)],
        kv_bytes=kv[_chosen("--kv-dtype", options.kv_dtype, kv)],
        experts=formats[_chosen("--experts", options.experts, formats)],
    )
    page = options.page_size
    deployment = Deployment(
        name=str(model_path or PRESET),
        config=model,
        draft=draft,
        form=form,
        layout=sglang_layout(model, draft, options.tp, options.dp, options.ep),
        device=ready,
        precision=precision,
        context=options.context,
        accept=options.accept_length,
        strategy=strategy,
        checkpoints=options.checkpoints,
        cached_tokens=options.cached_tokens,
        page=(1 if strategy == "no_buffer" else 128 if ready.kind == "npu" else 16) if page is None else page,
        chunk=options.chunk,
        host=int(options.host_gib * GIB),
    )
    return compute(deployment, options.device.lower(), options.concurrency)


def _chosen(option: str, value: str, known: Mapping[str, Any]) -> str:
    if value not in known:
        raise PlanError(f"unknown {option} {value}: pass one of {', '.join(known)}")
    return value
