"""Published figures that the planner is held against, its own beside them.

Each entry names its source. What a figure has beyond the roofline is what the planner cannot attribute; a
plan carries it over, per layer, from the figure of its kind of device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_k3.models.presets import real_draft_config, real_k3_config
from sglang_k3.planning.deployment import Deployment, parse
from sglang_k3.planning.devices import B300, DEVICES, GIB, Device
from sglang_k3.planning.layout import Layout, sglang_layout
from sglang_k3.planning.roofline import Step, step
from sglang_k3.planning.weights import (
    DENSE,
    EXPERTS,
    KDA,
    LATENT,
    MLA,
    ROUTER,
    SHARED,
    VOCABULARY,
    Precision,
    weights,
)
from sglang_k3.speculative.record_forms import FORMS

_GRAPH_LAUNCH = 1e-6
"""Seconds an operator costs in a captured graph, which every published run used. Chosen, as B300's
collective of 8 us, so that the fastest run without a draft (b300-c1) is explained almost whole."""

RECIPE = "hicann/cann-recipes-infer, kimi_k3 inference guide"
RECIPE_LAYOUT = Layout(
    ranks=32,
    attention=32,
    mla=1,
    mla_output=32,
    mlp=32,
    embedding=32,
    head=32,
    experts=32,
    expert_rows=1,
    draft=32,
)
RECIPE_GIB = {
    VOCABULARY: 0.136,
    MLA: 2.752,
    KDA: 1.769,
    ROUTER: 2.201,
    SHARED: 0.708,
    EXPERTS: 42.097,
    LATENT: 8.805,
    DENSE: 0.042,
}
"""GiB a card of its first 32-card layout (revision of August 2026): all modules, 58.51 in sum. KDA counts its
five large projections alone."""


@dataclass(frozen=True)
class Figure:
    """One published time. tpot: seconds an output token."""

    key: str
    source: str
    deployment: Deployment
    concurrency: int
    tpot: float

    @property
    def published_step(self) -> float:
        """Seconds a step."""
        return self.tpot * (self.deployment.accept if self.deployment.draft else 1)

    @property
    def own(self) -> Step:
        return step(self.deployment, self.concurrency, self.deployment.context)

    @property
    def unattributed(self) -> float:
        """Seconds of the published step that the planner has no part for."""
        return self.published_step - self.own.total


CALIBRATION = {"a3": "a3-tp64", "950pr": "950dt-32", "950dt": "950dt-32"}
"""The figure whose remainder a device's plans carry over. There is none for a 950PR: the 950DT's is taken."""


def recipe_weights() -> dict[str, float]:
    """GiB a card by module of the layout of RECIPE_GIB, as the planner counts it."""
    config, _ = parse(real_k3_config(), None)
    precision = Precision(matrices={ROUTER: 32}, copies=False)
    return {name: module.size / GIB for name, module in weights(config, RECIPE_LAYOUT, precision).items()}


def figures() -> dict[str, Figure]:
    """All of them, by key."""
    config, draft = parse(real_k3_config(), real_draft_config())
    assert draft is not None
    base = Deployment(
        name="kimi-k3",
        config=config,
        draft=None,
        form=None,
        layout=RECIPE_LAYOUT,
        device=DEVICES["950dt"],
        precision=Precision(copies=False),
        context=8192 + 512,
        accept=1.0,
        strategy="off",
        checkpoints=None,
        cached_tokens=0,
        page=128,
        chunk=8192,
        host=0,
    )
    plain = FORMS["plain"]

    def graphs(device: Device) -> Device:
        return replace(device, launch=_GRAPH_LAUNCH)

    a3 = replace(
        base,
        device=graphs(DEVICES["a3"]),
        form=plain,
        layout=sglang_layout(config, draft, 64, 4, 64),
        precision=Precision(experts="int4", copies=False),
    )
    b300 = replace(base, device=graphs(B300), layout=sglang_layout(config, draft, 8, 1, 1))
    cookbook = "SGLang cookbook, Kimi-K3 on B300 TP8, MXFP4, 8192 tokens in and 1024 out"
    found = (
        Figure(
            "950dt-32",
            f"{RECIPE}: 32 x 950DT, KDA TP16, MLA DP, EP32, 32 requests of 100K, accept length taken as 4",
            replace(
                base,
                draft=draft,
                form=plain,
                accept=4.0,
                device=graphs(DEVICES["950dt"]),
                context=102400,
                layout=replace(
                    RECIPE_LAYOUT, attention=16, mla_output=16, mlp=8, embedding=16, head=8, draft=8
                ),
                precision=Precision(kv_bytes=1, matrices={ROUTER: 32, MLA: 8.25, LATENT: 8.25}, copies=False),
            ),
            32,
            10.3e-3,
        ),
        Figure(
            "a3-tp64",
            "sglang #36947: 64 A3 dies, DP4 TP64, W4A8, one request of 8K/1K, 15 drafts, accept length 8.424",
            replace(a3, draft=replace(draft, gamma=15), accept=8.424),
            1,
            8.12e-3,
        ),
        Figure(
            "a3-dp4-tp16",
            "vllm-ascend #14454: 64 A3 dies, DP4 TP16 EP64, 4 requests of 2K/1K, 7 drafts, accept length "
            "5.223",
            replace(a3, draft=draft, accept=5.223, context=2048 + 512),
            4,
            22.25e-3,
        ),
        Figure("b300-c1", f"{cookbook}, no draft, 1 request", b300, 1, 8.51e-3),
        Figure("b300-c16", f"{cookbook}, no draft, 16 requests", b300, 16, 19.47e-3),
        Figure(
            "b300-dspark-c1",
            f"{cookbook}, DSPARK with the accept length set to 4.5, 1 request",
            replace(b300, draft=draft, form=plain, accept=4.5),
            1,
            2.84e-3,
        ),
    )
    return {figure.key: figure for figure in found}
