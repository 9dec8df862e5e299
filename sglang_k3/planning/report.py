"""A plan: memory, largest concurrency, flags, step time, and published figures; as data and as text."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from sglang_k3.planning import published
from sglang_k3.planning.deployment import Deployment
from sglang_k3.planning.devices import GIB
from sglang_k3.planning.errors import PlanError
from sglang_k3.planning.memory import (
    Memory,
    cache_params,
    draft_kv_bytes,
    kv_bytes,
    largest,
    memory,
    room,
)
from sglang_k3.planning.roofline import OPERATORS, Step, step
from sglang_k3.planning.weights import DRAFT

LABEL = "Estimate: bytes follow the allocator, times are a roofline. Nothing here was measured on a device."
NOT_ATTRIBUTED = "not attributed"
_STATE_FORMATS = {"torch.float32": "float32", "torch.bfloat16": "bfloat16"}


@dataclass(frozen=True)
class Plan:
    """What `plan` finds. concurrency: planned for; largest: what fits, 0 where the weights alone do not.

    unattributed: key of a published figure, and the seconds a step carried over from it; None where the
    device has no figure.
    """

    deployment: Deployment
    device_key: str
    concurrency: int
    largest: int
    memory: Memory
    room: int
    step: Step
    unattributed: tuple[str, float] | None

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.room


def plan(deployment: Deployment, device_key: str, concurrency: int | None) -> Plan:
    """concurrency None: the largest that fits, or one request for each group where none does.

    Raises PlanError for a deployment that can't be, naming the value and the remedy.
    """
    deployment.check()
    groups = deployment.layout.groups
    most = largest(deployment)
    if concurrency is None:
        concurrency = most or groups
    if concurrency < 1:
        raise PlanError(f"--concurrency {concurrency} must be at least 1")
    carried = None
    if (key := published.CALIBRATION.get(device_key)) is not None:
        figure = published.figures()[key]
        layers = deployment.config.num_layers / figure.deployment.config.num_layers
        carried = key, max(0.0, figure.unattributed) * layers
    return Plan(
        deployment,
        device_key,
        concurrency,
        most,
        memory(deployment, concurrency),
        room(deployment),
        step(deployment, concurrency, deployment.context),
        carried,
    )


def flags(found: Plan) -> tuple[dict[str, str], list[str]]:
    """Environment variables, and launch_server's flags, that make SGLang allocate what was planned."""
    deployment, counts = found.deployment, found.memory.counts
    layout = deployment.layout
    groups = layout.groups
    given = [
        *("--model-path", deployment.name, "--device", deployment.device.kind),
        *("--dtype", str(deployment.precision.dtype).removeprefix("torch.")),
        *("--tp-size", str(layout.ranks)),
    ]
    if layout.experts > 1:
        given += ["--ep-size", str(layout.experts)]
    if groups > 1:
        given += ["--enable-dp-attention", "--dp-size", str(groups)]
    given += [
        *("--context-length", str(deployment.context), "--page-size", str(deployment.page)),
        *("--chunked-prefill-size", str(deployment.chunk)),
        *("--max-running-requests", str(counts.requests * groups)),
        *("--max-mamba-cache-size", str(counts.slots * groups)),
        *("--max-total-tokens", str(counts.tokens)),
        *("--mamba-ssm-dtype", _STATE_FORMATS[str(deployment.precision.state)]),
    ]
    if deployment.device.kind != "cpu":
        # Of what the runtime leaves free; the rest is for working memory and communication.
        share = math.ceil(1000 * found.memory.static / found.room)
        given += ["--mem-fraction-static", f"{min(share, 999) / 1000:.3f}"]
    if deployment.strategy == "off":
        given.append("--disable-radix-cache")
    else:
        given += ["--mamba-radix-cache-strategy", deployment.strategy]
    if deployment.strategy == "no_buffer":
        given.append("--disable-overlap-schedule")
    environment = {}
    if deployment.draft is not None and deployment.form is not None:
        given += ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", "DRAFT"]
        environment["SGLANG_K3_RECORDS"] = deployment.form.name
    return environment, given


def refusals(found: Plan) -> list[str]:
    """What this release does not serve of a plan: planned for, and refused at start."""
    deployment, config = found.deployment, found.deployment.config
    device = deployment.device.kind
    said = []
    if deployment.layout.groups > 1:
        said.append("attention data parallelism (--dp) is not in this release")
    if deployment.host:
        said.append("a host tier (hierarchical cache) for KDA states is not in this release")
    if deployment.precision.kv_bytes != deployment.precision.dtype.itemsize:
        said.append("the latent cache is kept in the model's dtype in this release")
    if deployment.precision.experts == "int4":
        said.append("int4 experts (W4A8) are not in this release")
    packed = config.moe is not None and config.moe.packed and deployment.precision.experts == "checkpoint"
    if packed and found.device_key == "a3":
        said.append("MXFP4 experts are refused on an A3: pass --experts int4 to plan for such weights")
    if device == "npu":
        if deployment.form is not None and deployment.form.anchored:
            said.append("--records anchored is refused on an NPU")
        if str(deployment.precision.state) != "torch.float32":
            said.append("states in bfloat16 are refused on an NPU")
        if packed:
            said.append("MXFP4 experts are unpacked for each step on a 950: slower than planned")
        if deployment.layout.ranks > 1:
            said.append("several ranks were not verified on NPUs")
        said.append("nothing here has run on a real NPU")
    return said


def assumptions(found: Plan) -> list[str]:
    """What the times and the estimated bytes stand on."""
    deployment, device = found.deployment, found.deployment.device
    said = [
        f"{device.name}: {device.memory / GIB:.1f} GiB, {device.reserve / GIB:.0f} of them the runtime's; "
        f"{device.bandwidth / 1e12:.3g} TB/s, {device.flops / 1e12:.4g} TFLOPS, link {device.link / 1e9:.4g} "
        f"GB/s one way; {device.launch * 1e6:.3g} us an operator, {device.collective * 1e6:.3g} us a "
        "collective",
        *device.sources,
        "bytes move at the full bandwidth, one part after another; each product at the bf16 peak",
        f"each of {found.step.rows} rows chooses experts uniformly: {found.step.distinct:.0f} distinct ones "
        "a layer",
        f"every request has {deployment.context} tokens behind it",
        "operators launched: " + ", ".join(f"{what} {count}" for what, count in OPERATORS.items()),
        "working memory and communication buffers are estimates: no pool of SGLang's",
    ]
    if deployment.draft is not None:
        said.append(f"a verify step yields {deployment.accept:g} tokens: measure your own workload's")
    if found.unattributed is not None:
        key, seconds = found.unattributed
        said.append(
            f"{NOT_ATTRIBUTED}: {seconds * 1e3:.1f} ms a step, what the figure {key} has beyond the "
            "roofline, for so many layers"
        )
    else:
        said.append(f"{NOT_ATTRIBUTED}: no published figure for this device, so nothing is added")
    return said


def as_dict(found: Plan) -> dict[str, Any]:
    """The plan as JSON has it; docs/planner.md documents the keys."""
    deployment, counts = found.deployment, found.memory.counts
    params = cache_params(deployment)
    environment, given = flags(found)
    per_host = params.mamba_cache_per_req + deployment.context * kv_bytes(deployment)
    carried = None if found.unattributed is None else found.unattributed[1]
    return {
        "label": LABEL,
        "fits": found.fits,
        "concurrency": found.concurrency,
        "largest_concurrency": found.largest,
        "per_rank": {
            "weights": found.memory.weights,
            "pools": found.memory.pools,
            "estimates": found.memory.other,
            "total": found.memory.total,
            "room": found.room,
        },
        "units": {
            "slot": params.mamba_cache_per_req,
            "mla_token": kv_bytes(deployment),
            "draft_token": draft_kv_bytes(deployment),
            "record_request": _record_request(deployment),
            "states_request": deployment.drafted_rows * params.mamba_cache_per_req,
        },
        "counts": {
            "requests": counts.requests,
            "slots": counts.slots,
            "slots_per_request": counts.slots_per_request,
            "checkpoints": counts.checkpoints,
            "tokens": counts.tokens,
        },
        "host": {
            "bytes": deployment.host,
            "prefixes": deployment.host // per_host,
            "prefix_bytes": per_host,
        },
        "environment": environment,
        "flags": given,
        "refused": refusals(found),
        "step": {
            "seconds": found.step.seconds,
            "total": found.step.total,
            "rows": found.step.rows,
            "distinct_experts": found.step.distinct,
            "tokens": found.step.tokens,
            "tpot": found.step.tpot,
            "not_attributed": carried,
            "tpot_with_not_attributed": (
                None if carried is None else (found.step.total + carried) / found.step.tokens
            ),
        },
        "assumptions": assumptions(found),
        "published": [
            {
                "key": figure.key,
                "source": figure.source,
                "published_step": figure.published_step,
                "own_step": figure.own.total,
                "not_attributed": figure.unattributed,
            }
            for figure in published.figures().values()
        ],
        "published_weights": {
            "source": published.RECIPE,
            "gib": published.RECIPE_GIB,
            "own_gib": published.recipe_weights(),
        },
    }


def as_text(found: Plan) -> Group:
    """The same for a terminal."""
    values = as_dict(found)
    deployment = found.deployment
    layout = deployment.layout
    head = Text(f"{LABEL}\n", "bold")
    head.append(
        f"{deployment.name} on {layout.ranks} x {deployment.device.name}, {deployment.context:,} tokens a "
        f"request, {found.concurrency:,} at once; largest that fits: {found.largest:,}\n",
        "not bold",
    )
    if not found.fits:
        over = found.memory.total - found.room
        head.append(
            f"Does not fit: {over / GIB:.2f} GiB too much on each rank. {_remedy(found)}\n", "bold red"
        )
    return Group(
        head,
        _bytes_table(found),
        _units_table(values),
        _step_table(found),
        _published_table(values),
        _recipe_table(values),
        _list("Flags", [_command(values)]),
        _list("Not served by this release", values["refused"]),
        _list("Assumptions", values["assumptions"]),
    )


def _record_request(deployment: Deployment) -> int:
    from sglang_k3.speculative.replay_records import bytes_per_request

    if deployment.draft is None or deployment.form is None:
        return 0
    params = cache_params(deployment)
    return bytes_per_request(params, deployment.drafted_rows, deployment.form, deployment.device.kind)


def _remedy(found: Plan) -> str:
    if found.largest:
        return f"Pass --concurrency {found.largest} or less, a shorter --context, or more ranks."
    spare = found.room - sum(found.memory.weights.values())
    if spare <= 0:
        return "The weights alone do not fit: pass more ranks (--tp, --ep)."
    return "Not one request fits: pass a shorter --context, fewer --checkpoints, or more ranks."


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, title=f"\n{title}", title_justify="left")
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _bytes_table(found: Plan) -> Table:
    table = _table("Memory of one rank", "", "bytes", "GiB", "share")
    used = found.memory
    for name, size in (*used.weights.items(), *used.pools.items(), *used.other.items()):
        kind = "weights: " if name in used.weights and name != DRAFT else ""
        kind = "estimate: " if name in used.other else kind
        share = f"{size / found.room:.1%}" if found.room > 0 else ""
        table.add_row(f"{kind}{name}", f"{size:,}", f"{size / GIB:,.2f}", share)
    table.add_row("all", f"{used.total:,}", f"{used.total / GIB:,.2f}", "", style="bold")
    table.add_row("room", f"{found.room:,}", f"{found.room / GIB:,.2f}", "")
    return table


def _units_table(values: dict[str, Any]) -> Table:
    units, counts = values["units"], values["counts"]
    table = _table("What it is made of", "", "bytes")
    for name, what in (
        ("slot", "a state slot"),
        ("mla_token", "a token in the MLA cache"),
        ("draft_token", "a token in the draft's cache"),
        ("record_request", "a running request's records"),
        ("states_request", "full states instead of records"),
    ):
        if units[name]:
            table.add_row(what, f"{units[name]:,}")
    slots = f"{counts['slots']:,} ({counts['slots_per_request']} a request, {counts['checkpoints']:,} cached)"
    table.add_row("slots, of a group of ranks", slots)
    table.add_row("tokens, of a group of ranks", f"{counts['tokens']:,}")
    if values["host"]["bytes"]:
        table.add_row("prefixes on the host", f"{values['host']['prefixes']:,}")
    return table


def _step_table(found: Plan) -> Table:
    table = _table("One decode step (roofline, estimate)", "", "ms", "share")
    whole = found.step.total
    for name, seconds in found.step.seconds.items():
        if seconds:
            table.add_row(name, f"{seconds * 1e3:.2f}", f"{seconds / whole:.0%}")
    table.add_row("step", f"{whole * 1e3:.2f}", "", style="bold")
    table.add_row(f"TPOT, {found.step.tokens:g} tokens a step", f"{found.step.tpot * 1e3:.2f}", "")
    if found.unattributed is not None:
        carried = found.unattributed[1]
        table.add_row(f"{NOT_ATTRIBUTED} (from {found.unattributed[0]})", f"{carried * 1e3:.2f}", "")
        table.add_row("TPOT with it", f"{(whole + carried) / found.step.tokens * 1e3:.2f}", "")
    return table


def _published_table(values: dict[str, Any]) -> Table:
    table = _table("Published steps beside the planner's (ms)", "", "published", "own", NOT_ATTRIBUTED)
    table.add_column("source", overflow="fold")
    for row in values["published"]:
        milliseconds = (f"{row[key] * 1e3:.1f}" for key in ("published_step", "own_step", "not_attributed"))
        table.add_row(row["key"], *milliseconds, row["source"])
    return table


def _recipe_table(values: dict[str, Any]) -> Table:
    found = values["published_weights"]
    table = _table(f"Weights of a card, 32-card layout of {found['source']} (GiB)", "", "published", "own")
    for name, gib in found["gib"].items():
        table.add_row(name, f"{gib:.3f}", f"{found['own_gib'][name]:.3f}")
    table.add_row("all", f"{sum(found['gib'].values()):.2f}", f"{sum(found['own_gib'].values()):.2f}")
    return table


def _command(values: dict[str, Any]) -> str:
    environment = "".join(f"{name}={value} " for name, value in values["environment"].items())
    return f"{environment}python -m sglang.launch_server {shlex.join(values['flags'])}"


def _list(title: str, lines: list[str]) -> Text:
    return Text(f"\n{title}\n" + "\n".join(f"  {line}" for line in lines)) if lines else Text("")
