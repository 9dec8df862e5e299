"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_SMOOTHING = 0.95


def loss_curve(
    path: Path,
    tokens: Sequence[int],
    losses: Sequence[float],
    held_out: Sequence[tuple[int, float]],
    seen_label: str = "tokens seen",
    held_out_label: str = "bits per byte",
) -> None:
    """Training loss (nats) and a held-out figure over what was seen, as a PNG."""
    from matplotlib.figure import Figure

    seen = [count / 1e6 for count in tokens]
    smooth, mean = [], losses[0]
    for loss in losses:
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        smooth.append(mean)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(seen, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(seen, smooth, color="tab:blue", label="training loss, nats")
    axes.set_xlabel(f"{seen_label}, millions")
    axes.set_ylabel("nats")
    axes.grid(alpha=0.3)
    bits = axes.twinx()
    bits.plot(
        [count / 1e6 for count, _ in held_out],
        [value for _, value in held_out],
        "o-",
        color="tab:orange",
        label=f"held out, {held_out_label}",
    )
    bits.set_ylabel(held_out_label)
    handles = [line for side in (axes, bits) for line in side.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
