"""The options of `sglang-k3 plan`, and what it prints."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from sglang_k3.planning.report import Plan

_PRESET = "kimi-k3"


def plan(
    device: Annotated[str, typer.Option(help="a3 (one die), 950pr, 950dt, cpu or custom.")],
    tp: Annotated[int, typer.Option(help="Ranks (--tp-size).")] = 1,
    dp: Annotated[int, typer.Option(help="Groups of ranks with requests of their own, within --tp.")] = 1,
    ep: Annotated[int, typer.Option(help="Ranges of experts (--ep-size), within --tp.")] = 1,
    model_path: Annotated[Path | None, typer.Option(help="A checkpoint; without it Kimi K3 itself.")] = None,
    context: Annotated[int, typer.Option(help="Tokens of a request, prompt and answer.")] = 131072,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests at once, in all; without it the most that fit.")
    ] = None,
    draft: Annotated[
        str, typer.Option(help="none, kimi-k3 (RadixArk/Kimi-K3-DSpark), or a draft's folder.")
    ] = "none",
    records: Annotated[
        str | None, typer.Option(help="plain, folded, ring or anchored: when a verify's rows are committed.")
    ] = None,
    accept_length: Annotated[float, typer.Option(help="Tokens that a verify step yields.")] = 4.0,
    cache_strategy: Annotated[
        str | None, typer.Option(help="off, no_buffer, extra_buffer or extra_buffer_lazy.")
    ] = None,
    checkpoints: Annotated[
        int | None, typer.Option(help="Cached states of a group of ranks; without it one a running request.")
    ] = None,
    cached_tokens: Annotated[
        int, typer.Option(help="KV tokens of a group kept for prefixes, beside running requests'.")
    ] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    state_dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    kv_dtype: Annotated[str, typer.Option(help="auto (the model's) or fp8.")] = "auto",
    experts: Annotated[str, typer.Option(help="checkpoint, int4 (W4A8) or bfloat16.")] = "checkpoint",
    page_size: Annotated[int | None, typer.Option(help="Tokens of a KV page.")] = None,
    chunk: Annotated[int, typer.Option(help="Tokens of a prefill step.")] = 8192,
    host_gib: Annotated[float, typer.Option(help="Host memory for the cache, a rank.")] = 0.0,
    memory_gib: Annotated[float | None, typer.Option(help="Memory of a device.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Of its memory, GB a second.")] = None,
    tflops: Annotated[float | None, typer.Option(help="Dense bf16 products, TFLOPS.")] = None,
    link: Annotated[float | None, typer.Option(help="To other ranks, one way, GB a second.")] = None,
    launch_us: Annotated[float | None, typer.Option(help="Fixed cost of an operator.")] = None,
    collective_us: Annotated[float | None, typer.Option(help="Fixed cost of a collective.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write stacked bars to this file.")] = None,
) -> None:
    """Say what a deployment takes of each rank, what fits, and estimate its time a token. Exit code 1 when it
    does not fit or cannot be."""
    from sglang_k3.planning.errors import PlanError

    figures = {
        "memory_gib": memory_gib, "bandwidth": bandwidth, "tflops": tflops, "link": link,
        "launch_us": launch_us, "collective_us": collective_us,
    }  # fmt: skip
    options = dict(
        tp=tp, dp=dp, ep=ep, model_path=model_path, context=context, draft=draft, records=records,
        accept_length=accept_length, cache_strategy=cache_strategy, checkpoints=checkpoints,
        cached_tokens=cached_tokens, dtype=dtype, state_dtype=state_dtype, kv_dtype=kv_dtype, experts=experts,
        page_size=page_size, chunk=chunk, host_gib=host_gib,
    )  # fmt: skip
    try:
        with (
            # Importing SGLang prints notes of its own; standard output belongs to the plan.
            contextlib.redirect_stdout(sys.stderr),
            warnings.catch_warnings(),
            Console(stderr=True).status("Reading shapes ..."),
        ):
            warnings.simplefilter("ignore")
            found = make(device, figures, options, concurrency)
            if plot is not None:
                from sglang_k3.planning.plot import plot as draw

                draw(found, plot)
            from sglang_k3.planning.report import as_dict, as_text

            shown: Any = as_dict(found) if as_json else as_text(found)
    except PlanError as error:
        Console(stderr=True).print(Text(str(error), "bold red"))
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps(shown, indent=2))
    else:
        Console().print(shown)
    if not found.fits:
        raise typer.Exit(1)


def make(
    device: str, figures: dict[str, float | None], options: dict[str, Any], concurrency: int | None
) -> Plan:
    """The plan for the command's options, by their names. Raises PlanError."""
    from sglang_k3.planning.errors import PlanError

    try:
        import sglang  # noqa: F401
        import torch
    except ImportError as error:
        raise PlanError(
            f"the planner takes shapes from the server's own code, and {error.name} is not installed: "
            "install sglang-k3[cpu], here or on another machine"
        ) from error

    from sglang_k3.models.presets import real_draft_config, real_k3_config
    from sglang_k3.planning.deployment import Deployment, parse, read_config
    from sglang_k3.planning.devices import GIB
    from sglang_k3.planning.devices import device as find
    from sglang_k3.planning.layout import sglang_layout
    from sglang_k3.planning.report import plan as compute
    from sglang_k3.planning.weights import Precision
    from sglang_k3.speculative.record_forms import DEFAULT, DEFAULT_ON_NPU, FORMS

    model_path, draft_name = options["model_path"], options["draft"]
    ready = find(device, **figures)
    drafts = {"none": lambda: None, _PRESET: real_draft_config}
    model, draft = parse(
        real_k3_config() if model_path is None else read_config(model_path),
        drafts.get(draft_name, lambda: read_config(Path(draft_name)))(),
    )
    form = None
    records, strategy = options["records"], options["cache_strategy"]
    if draft is not None:
        records = records or (DEFAULT_ON_NPU if ready.kind == "npu" else DEFAULT)
        form = FORMS[_chosen("--records", records, FORMS)]
    elif records is not None:
        raise PlanError(f"--records {records} is of a server that speculates: add --draft, or leave it out")
    if strategy is None:
        strategy = "extra_buffer_lazy" if form is not None and form.anchored else "extra_buffer"
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    dtype = dtypes[_chosen("--dtype", options["dtype"], dtypes)]
    kv = {"auto": dtype.itemsize, "fp8": 1}
    formats = {"checkpoint": "checkpoint", "int4": "int4", "bfloat16": "bfloat16"}
    precision = Precision(
        dtype=dtype,
        state=dtypes[_chosen("--state-dtype", options["state_dtype"], dtypes)],
        kv_bytes=kv[_chosen("--kv-dtype", options["kv_dtype"], kv)],
        experts=formats[_chosen("--experts", options["experts"], formats)],  # type: ignore[arg-type]
    )
    page = options["page_size"]
    deployment = Deployment(
        name=str(model_path or _PRESET),
        config=model,
        draft=draft,
        form=form,
        layout=sglang_layout(model, draft, options["tp"], options["dp"], options["ep"]),
        device=ready,
        precision=precision,
        context=options["context"],
        accept=options["accept_length"],
        strategy=strategy,
        checkpoints=options["checkpoints"],
        cached_tokens=options["cached_tokens"],
        page=(1 if strategy == "no_buffer" else 128 if ready.kind == "npu" else 16) if page is None else page,
        chunk=options["chunk"],
        host=int(options["host_gib"] * GIB),
    )
    return compute(deployment, device.lower(), concurrency)


def _chosen(option: str, value: str, known: dict[str, Any]) -> str:
    from sglang_k3.planning.errors import PlanError

    if value not in known:
        raise PlanError(f"unknown {option} {value}: pass one of {', '.join(known)}")
    return value
