"""Tier (a) and the operators of tier (b): every call of a vendor's operator against its schema on the meta
device, and its values on the emulated NPU against the oracle; and that a changed call turns a tier red.

Not proven here: that CANN's kernels compute what references.py says, or accept what their meta kernels do;
for packages other than torch_npu, that an installed one has the schemas of packages.py.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from sglang_k3.kernels import registry
from sglang_k3.kernels.activation import ascend as activation
from sglang_k3.kernels.moe import ascend as moe
from sglang_k3.kernels.moe import ascend_mx as moe_mx
from sglang_k3.kernels.rms_norm import ascend as norm
from tests.npu import packages, sites, table
from tests.npu.mutations import PACKAGE, Interposed, Line, changes, import_kernels
from tests.npu.sites import SITES, Site

RED = (AssertionError, RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AttributeError)

NO_CHANGE = {
    ("npu_moe_init_routing_v2", "without active_expert_range"): "all experts are what no range means",
}
"""Changes that leave a call what it is, by operator and name, each with the reason."""


@pytest.fixture(scope="module", autouse=True)
def vendors(emulator) -> None:
    packages.install(emulator)
    import_kernels()


@pytest.fixture(scope="module")
def lines(vendors) -> dict[Line, list[Site]]:
    """The lines that call an operator, and the sites that run them."""
    found: dict[Line, list[Site]] = {}
    for site in SITES:
        with Interposed().installed() as interposed:
            site.run("meta")
        for line in interposed.calls:
            found.setdefault(line, []).append(site)
    return found


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_calls_fit_their_schemas_and_compute_the_oracle(site: Site):
    site.check()


def test_every_call_that_is_written_is_among_them(lines):
    written = Counter(
        (str(file.relative_to(PACKAGE)), operator)
        for file in PACKAGE.rglob("*.py")
        for operator in re.findall(r"(?:operators\(\)|npu)\.(npu_\w+)\(", file.read_text())
    )
    called = Counter((line.file, line.operator) for line in lines if line.operator.startswith("npu_"))
    assert called == written
    others = {line.operator for line in lines} - {operator for _, operator in written}
    assert others == {
        *("causal_conv1d", "situ", "fused_kda_gate_npu", "flash_mla_with_kvcache", packages.COMMIT),
        "flash_mla_with_kvcache_metadata",
    }


def test_every_implementation_of_a_vendors_operator_is_among_the_sites():
    entries = [e for operator in registry.operators() for e in registry.implementations(operator)]
    own = ("torch", table.OURS)
    vendors = {e.function for e in entries if e.device == "npu" and table.source(e) not in own}
    assert {site.function for site in SITES} == vendors - {activation.situ_and_mul}


def test_every_changed_call_turns_a_tier_red(lines, capsys):
    """An argument removed, two swapped, a shape changed, at every line that calls an operator."""
    red, green = Counter[str](), []
    for line, through in lines.items():
        calls: dict[str, Any] = {}
        for site in through:
            with Interposed().installed() as interposed:
                site.run("meta")
                calls |= dict.fromkeys((name for name, _ in changes(interposed.calls[line])))
        for name in calls:
            tier = next((tier for site in through if (tier := _red(site, line, name))), None)
            if tier is None:
                green.append((line.operator, name))
            else:
                red[tier] += 1
    with capsys.disabled():
        print(f"\n{sum(red.values())} changed calls at {len(lines)} lines turn red: {dict(red)}")
    assert len(lines) >= 10
    assert sorted(green) == sorted(NO_CHANGE), green


def _red(site: Site, line: Line, name: str) -> str | None:
    """The first tier in which a site notices the change."""
    for tier, device in (("schemas", "meta"), ("numbers", "npu")):
        with Interposed().installed() as interposed:
            interposed.changed, interposed.change = line, _change(name, interposed, line)
            try:
                site.check(device)
            except RED:
                return tier
    return None


def _change(name: str, interposed: Interposed, line: Line) -> Any:
    """The change of that name, made of the call as it comes; a call that has no such change stays."""

    def apply(args: list[Any], kwargs: dict[str, Any]) -> Any:
        found = dict(changes(interposed.calls[line])).get(name)
        return (args, kwargs) if found is None else found(args, kwargs)

    return apply


def test_own_checks_stand_in_front_of_what_torch_npu_lets_pass():
    x, ids, weights, w13, w2, *betas = sites.expert_inputs()
    for wrong in (
        (x[:, :-1], ids, weights, w13, w2),
        (x, ids[:-1], weights, w13, w2),
        (x, ids, weights, w13, w2[:, :, :-1]),
    ):
        with pytest.raises(ValueError, match="experts"):
            moe.experts(*wrong, *betas)
    x, ids, weights, *packed = sites.packed_inputs()
    for at, wrong in (
        (0, packed[0][:, :, :-1]),
        (1, packed[1][:, :-1]),
        (2, packed[2].int()),
        (3, packed[3][:-1]),
    ):
        given = [*packed[:at], wrong, *packed[at + 1 :]]
        with pytest.raises(ValueError, match="experts"):
            moe_mx.experts_quantised(*sites.on("meta", x, ids, weights, *given))
    with pytest.raises(ValueError, match="rms_norm"):
        norm.rms_norm(sites.made(2, 4), sites.made(3), 1e-5)
    with pytest.raises(ValueError, match="route"):
        moe.route(sites.made(2, 4), sites.made(3), 2, True, 1.0, 1, 1, "sigmoid")
