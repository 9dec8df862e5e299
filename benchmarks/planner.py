"""Writes the figures of docs/planner.md: plans of four deployments, and published figures beside ours.

    python -m benchmarks.planner

Nothing is measured: the figures follow from shapes, announced peaks and the assumptions that `sglang-k3 plan`
prints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_k3.planning.options import PRESET, Options

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PICTURE = DOCS / "planner.md", DOCS / "planner.png"
BEGIN, END = "<!-- written by python -m benchmarks.planner -->", "<!-- end -->"
CONTEXT = 131072


CASES: tuple[dict[str, Any], ...] = (
    {"device": "950dt", "tp": 16, "ep": 16},
    {"device": "950dt", "tp": 32, "dp": 2, "ep": 32},
    {"device": "950pr", "tp": 32, "dp": 2, "ep": 32},
    {"device": "a3", "tp": 64, "dp": 4, "ep": 64, "experts": "int4"},
)


def options_of(case: dict[str, Any]) -> Options:
    return Options(**case, context=CONTEXT, draft=PRESET, records="plain")


def figures() -> str:
    """The part of the page between BEGIN and END."""
    from sglang_k3.planning.devices import GIB
    from sglang_k3.planning.options import make
    from sglang_k3.planning.report import as_dict

    lines = [
        f"Kimi K3 with its draft, {CONTEXT:,} tokens a request, records in the plain form, at the largest "
        "concurrency that fits. Estimates.",
        "",
        "| ranks | options | weights, GiB | slot, MB | records, MB | full states, MB | largest | TPOT, ms | "
        "with what is not attributed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    shared: dict[str, Any] = {}
    for case in CASES:
        found = make(options_of(case))
        values = shared = as_dict(found)
        units, step = values["units"], values["step"]
        given = " ".join(f"--{name} {value}" for name, value in case.items())
        ranks = found.deployment.layout.ranks
        lines.append(
            f"| {ranks} x {found.deployment.device.name} | `{given}` | "
            f"{sum(values['per_rank']['weights'].values()) / GIB:.1f} | {units['slot'] / 1e6:.1f} | "
            f"{units['record_request'] / 1e6:.1f} | {units['states_request'] / 1e6:.0f} | "
            f"{values['largest_concurrency']} | {step['tpot'] * 1e3:.1f} | "
            f"{step['tpot_with_not_attributed'] * 1e3:.1f} |"
        )
    lines += [
        "",
        "Published steps, and the planner's for the same run (a step yields the accept length in tokens):",
        "",
        "| run | published, ms | own, ms | not attributed, ms |",
        "| --- | --- | --- | --- |",
    ]
    for row in shared["published"]:
        step, own, rest = (row[key] * 1e3 for key in ("published_step", "own_step", "not_attributed"))
        lines.append(f"| {row['key']}: {row['source']} | {step:.1f} | {own:.1f} | {rest:.1f} |")
    weights = shared["published_weights"]
    lines += [
        "",
        f"Weights of a card in the first 32-card layout of {weights['source']}, GiB:",
        "",
        "| module | published | own |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {gib:.3f} | {weights['own_gib'][name]:.3f} |" for name, gib in weights["gib"].items()
    ]
    sums = sum(weights["gib"].values()), sum(weights["own_gib"].values())
    lines.append(f"| all | {sums[0]:.2f} | {sums[1]:.2f} |")
    return "\n".join(lines)


def main() -> None:
    from sglang_k3.planning.options import make
    from sglang_k3.planning.plot import plot

    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{figures()}\n\n{END}{after}")
    plot(make(options_of(CASES[0])), PICTURE)


if __name__ == "__main__":
    main()
