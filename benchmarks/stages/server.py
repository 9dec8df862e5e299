"""`python -m sglang.launch_server` with some of our features turned off, for the ablation only.

    K3_FEATURES="our model class,compiled KDA" python -m benchmarks.stages.server FLAGS

SGLang spawns its processes, and each spawned process imports this module again before it does anything: so
what stands at module level takes effect in all of them.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.stages.features import NAMES, is_on, plain_operators, stores_snapshots
from sglang_k3 import architectures
from sglang_k3.kernels import registry
from sglang_k3.kernels.registry import Call, Implementation

VARIABLE = "K3_FEATURES"


def turned_on() -> frozenset[str]:
    """Raises ValueError for a feature nobody knows."""
    names = frozenset(filter(None, os.environ[VARIABLE].split(",")))
    if names - set(NAMES):
        raise ValueError(f"unknown features {sorted(names - set(NAMES))}; known: {', '.join(NAMES)}")
    return names


Resolved = tuple[Implementation, tuple[tuple[str, str], ...]]


def _resolve_with(plain: tuple[str, ...], others: dict[str, Any] | None = None) -> Any:
    """A `registry.resolve` that hands out the reference for some operators, and for some a function of
    ours. `registry.choose` asks it too."""
    original = registry.resolve

    def resolve(operator: str, call: Call) -> Resolved:
        if others is not None and operator in others:
            mine = Implementation(operator, "ablation", others[operator], 0, False, "any", lambda call: None)
            return mine, ()
        found = {each.name: each for each in registry.implementations(operator)}
        if operator.split(".")[0] in plain and "reference" in found:
            return found["reference"], ()
        return original(operator, call)

    return resolve


def _apply(on: frozenset[str]) -> None:
    others = None
    if stores_snapshots(on):
        from benchmarks.stages import snapshot_operators

        others = {"kda.verify": snapshot_operators.verify, "kda.commit": snapshot_operators.commit}
    registry.resolve = _resolve_with(plain_operators(on), others)
    if not is_on(on, "model"):
        architecture = "KimiK3ForConditionalGeneration"
        architectures.ARCHITECTURES[architecture] = "benchmarks.stages.in_tree"


if VARIABLE in os.environ:
    _apply(turned_on())


def main() -> None:
    import runpy

    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
