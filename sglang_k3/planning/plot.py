"""The plan as two stacked bars: bytes of a rank, and a step's time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_k3.planning.devices import GIB
from sglang_k3.planning.errors import PlanError
from sglang_k3.planning.report import NOT_ATTRIBUTED, Plan


def plot(found: Plan, file: Path) -> None:
    """Write a picture; the file's name says in which format. Raises PlanError where matplotlib is missing or
    cannot write it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("--plot needs matplotlib: pip install matplotlib, or leave it out") from error

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    used = found.memory
    sizes = {
        name: size / GIB for name, size in (*used.weights.items(), *used.pools.items(), *used.other.items())
    }
    _stack(left, sizes, "memory of one rank, GiB")
    left.axhline(found.room / GIB, color="black", linestyle="--", linewidth=1)
    left.annotate("room", (0.45, found.room / GIB), fontsize=8, va="bottom", ha="right")
    parts = {name: seconds * 1e3 for name, seconds in found.step.seconds.items()}
    if found.unattributed is not None:
        parts[NOT_ATTRIBUTED] = found.unattributed[1] * 1e3
    _stack(right, parts, f"a step of {found.step.tokens:g} tokens a request, ms")
    deployment = found.deployment
    figure.suptitle(
        f"Estimate: {deployment.name}, {deployment.layout.ranks} x {deployment.device.name}, "
        f"{found.concurrency} requests of {deployment.context:,} tokens",
        fontsize=10,
    )
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise PlanError(f"--plot {file}: {error}: pass a file that can be written, as plan.png") from error


def _stack(axes: Any, parts: Mapping[str, float], title: str) -> None:
    from matplotlib import colormaps

    colours = colormaps["tab20"]
    under, whole = 0.0, sum(parts.values())
    shown = [(name, value) for name, value in parts.items() if value > 0]
    for number, (name, value) in enumerate(shown):
        label = f"{name} {value:.3g}"
        axes.bar(0, value, 0.5, bottom=under, color=colours(number % 20), label=label)
        if value > 0.04 * whole:
            axes.annotate(label, (0, under + value / 2), ha="center", va="center", fontsize=7)
        under += value
    axes.set_title(title, fontsize=9)
    axes.set_xlim(-0.5, 1.4)
    axes.set_xticks([])
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=7, loc="center right")
