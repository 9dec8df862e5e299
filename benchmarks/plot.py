"""The roofline of a report: what each operator achieved against what this machine allows."""

from __future__ import annotations

from pathlib import Path

from benchmarks.schema import Entry, Report

_COLOURS = (
    ("kda", "tab:blue"),
    ("short_conv", "tab:cyan"),
    ("gated_rms_norm", "tab:olive"),
    ("mla", "tab:red"),
    ("linear", "tab:pink"),
    ("mxfp4", "tab:orange"),
    ("experts", "tab:brown"),
    ("route", "tab:purple"),
    ("residual", "tab:green"),
)
_OTHER = "tab:gray"


def roofline(report: Report, path: Path) -> None:
    """Two panels as a PNG: operations a second over operations a byte, and each line's part of its limit."""
    from matplotlib.figure import Figure

    count = len(report.entries)
    figure = Figure(figsize=(15, max(6.0, 0.19 * count)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _roofs(left, report)
    for number, entry in enumerate(report.entries, start=1):
        left.plot(_intensity(entry), entry.gflops_per_second, "o", color=_colour(entry), markersize=5)
        left.annotate(
            str(number),
            (_intensity(entry), entry.gflops_per_second),
            fontsize=6,
            xytext=(3, 2),
            textcoords="offset points",
        )
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("operations a byte")
    left.set_ylabel("GFLOP/s")
    left.grid(alpha=0.3, which="both")
    left.legend(loc="lower right", fontsize=8)

    places = list(range(count))
    labels = [
        f"{number}  {entry.case} ({', '.join(entry.modes)}){'' if entry.valid else '  NOT VALID'}"
        for number, entry in enumerate(report.entries, start=1)
    ]
    right.barh(
        places,
        [entry.ratio for entry in report.entries],
        color=[_colour(entry) for entry in report.entries],
        hatch=["" if entry.limit == "memory" else "///" for entry in report.entries],
        edgecolor="white",
    )
    right.set_yticks(places, labels, fontsize=7)
    right.invert_yaxis()
    right.axvline(1.0, color="black", linewidth=0.8)
    right.set_xlabel("part of the limit reached (hatched: of matrix products)")
    right.grid(alpha=0.3, axis="x")
    figure.suptitle(f"{report.machine.cpu}, {report.machine.threads} threads, {report.settings.regime} run")
    figure.savefig(path, dpi=110)


def _roofs(axes, report: Report) -> None:
    """A sloped line for each memory probe, a level one for each matrix product."""
    intensities = sorted(_intensity(entry) for entry in report.entries)
    low, high = intensities[0] / 2, intensities[-1] * 2
    matmul = report.probes["matmul_fp32"].during
    for name, style in (("stream", "-"), ("copy", "--"), ("read", ":")):
        rate = report.probes[name].during
        knee = min(high, matmul / rate)
        label = f"{name} {rate:.1f} GB/s"
        axes.plot([low, knee], [low * rate, knee * rate], style, color="black", linewidth=1, label=label)
    for name, style in (("matmul_fp32", "-"), ("matmul_bf16", "--")):
        rate = report.probes[name].during
        axes.axhline(rate, linestyle=style, color="dimgray", linewidth=1, label=f"{name} {rate:.1f} GFLOP/s")


def _intensity(entry: Entry) -> float:
    return entry.flops / entry.bytes_moved


def _colour(entry: Entry) -> str:
    return next((colour for prefix, colour in _COLOURS if entry.case.startswith(prefix)), _OTHER)
