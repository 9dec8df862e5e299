"""The options of `sglang-k3 plan`, and what it prints."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from sglang_k3.planning.errors import PlanError
from sglang_k3.planning.options import Options, make


def plan(
    device: Annotated[str, typer.Option(help="a3 (one die), 950pr, 950dt, cpu or custom.")],
    tp: Annotated[int, typer.Option(help="Ranks (--tp-size).")] = Options.tp,
    dp: Annotated[
        int, typer.Option(help="Groups of ranks with requests of their own, within --tp.")
    ] = Options.dp,
    ep: Annotated[int, typer.Option(help="Ranges of experts (--ep-size), within --tp.")] = Options.ep,
    model_path: Annotated[Path | None, typer.Option(help="A checkpoint; without it Kimi K3 itself.")] = None,
    context: Annotated[int, typer.Option(help="Tokens of a request, prompt and answer.")] = Options.context,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests at once, in all; without it the most that fit.")
    ] = None,
    draft: Annotated[
        str, typer.Option(help="none, kimi-k3 (RadixArk/Kimi-K3-DSpark), or a draft's folder.")
    ] = Options.draft,
    records: Annotated[
        str | None, typer.Option(help="plain, folded, ring or anchored: when a verify's rows are committed.")
    ] = None,
    accept_length: Annotated[
        float, typer.Option(help="Tokens that a verify step yields.")
    ] = Options.accept_length,
    cache_strategy: Annotated[
        str | None, typer.Option(help="off, no_buffer, extra_buffer or extra_buffer_lazy.")
    ] = None,
    checkpoints: Annotated[
        int | None, typer.Option(help="Cached states of a group of ranks; without it one a running request.")
    ] = None,
    cached_tokens: Annotated[
        int, typer.Option(help="KV tokens of a group kept for prefixes, beside running requests'.")
    ] = Options.cached_tokens,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = Options.dtype,
    state_dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = Options.state_dtype,
    kv_dtype: Annotated[str, typer.Option(help="auto (the model's) or fp8.")] = Options.kv_dtype,
    experts: Annotated[str, typer.Option(help="checkpoint, int4 (W4A8) or bfloat16.")] = Options.experts,
    page_size: Annotated[int | None, typer.Option(help="Tokens of a KV page.")] = None,
    chunk: Annotated[int, typer.Option(help="Tokens of a prefill step.")] = Options.chunk,
    host_gib: Annotated[float, typer.Option(help="Host memory for the cache, a rank.")] = Options.host_gib,
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
    options = Options(
        device, tp=tp, dp=dp, ep=ep, model_path=model_path, context=context, concurrency=concurrency,
        draft=draft, records=records, accept_length=accept_length, cache_strategy=cache_strategy,
        checkpoints=checkpoints, cached_tokens=cached_tokens, dtype=dtype, state_dtype=state_dtype,
        kv_dtype=kv_dtype, experts=experts, page_size=page_size, chunk=chunk, host_gib=host_gib,
        memory_gib=memory_gib, bandwidth=bandwidth, tflops=tflops, link=link, launch_us=launch_us,
        collective_us=collective_us,
    )  # fmt: skip
    try:
        with (
            # Importing SGLang prints notes of its own; standard output belongs to the plan.
            contextlib.redirect_stdout(sys.stderr),
            warnings.catch_warnings(),
            Console(stderr=True).status("Reading shapes ..."),
        ):
            warnings.simplefilter("ignore")
            found = make(options)
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
