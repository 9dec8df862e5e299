"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_SMOOTHING = 0.95


def loss_curve(
    path: Path, tokens: Sequence[int], losses: Sequence[float], held_out: Sequence[tuple[int, float]]
) -> None:
    """Training loss (nats a token) and held-out bits per byte over the tokens seen, as a PNG."""
    from matplotlib.figure import Figure

    seen = [count / 1e6 for count in tokens]
    smooth, mean = [], losses[0]
    for loss in losses:
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        smooth.append(mean)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(seen, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(seen, smooth, color="tab:blue", label="training loss, nats a token")
    axes.set_xlabel("tokens seen, millions")
    axes.set_ylabel("nats a token")
    axes.grid(alpha=0.3)
    bits = axes.twinx()
    bits.plot(
        [count / 1e6 for count, _ in held_out],
        [value for _, value in held_out],
        "o-",
        color="tab:orange",
        label="held out, bits per byte",
    )
    bits.set_ylabel("bits per byte")
    handles = [line for side in (axes, bits) for line in side.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
