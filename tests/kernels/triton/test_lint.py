"""Our kernels are written in what triton-ascend takes, and the lint sees what it does not take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.triton.lint import findings, kernel_files


@pytest.mark.parametrize("path", kernel_files(), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_kernels_use_no_forbidden_form(path: Path):
    source = path.read_text()
    assert "@triton.jit" in source and findings(source) == []


def _kernel(*body: str) -> str:
    head = "@triton.jit\ndef planted(x, n, m, N: tl.constexpr):"
    return "\n".join([head, *("    " + line for line in body)]) + "\n"


@pytest.mark.parametrize(
    "body, named",
    [
        (["while n > 0:", "    n = n - 1"], "3: planted has a while loop"),
        (["for i in range(N):", "    break"], "4: planted has a break"),
        (["for i in range(N):", "    continue"], "4: planted has a continue"),
        (["if n > 0:", "    return", "tl.store(x, n)"], "4: planted has an early return"),
        (["y = tl.reduce(n, 0, lambda a, b: a + b)"], "3: planted has a lambda"),
        (["y = n[0]"], "3: planted has an indexed tensor, n[0]"),
        (["y = n[:, m]"], "3: planted has an indexed tensor, n[:, m]"),
        (["for i in range(n, N):", "    m = m + i"], "3: planted has a range of run-time and constexpr"),
        (
            ["for i in range(tl.program_id(0), N * 2):", "    m = m + i"],
            "has a range of run-time and constexpr",
        ),
        (["for i in (1, 2):", "    m = m + i"], "3: planted has a loop over (1, 2)"),
    ],
)
def test_a_planted_form_is_found(body: list[str], named: str):
    (found,) = findings(_kernel(*body))
    assert named in found


def test_what_the_compiler_takes_is_not_found():
    assert not findings(
        _kernel(
            "T: tl.constexpr = N // 2",
            "for i in range(tl.program_id(0), n, tl.num_programs(0)):",
            "    for j in range(0, T):",
            "        y = m[:, None] * n[None, :]",
            "return y",
        )
    )


def test_a_function_of_the_host_may_use_any_form():
    assert not findings("def host(n):\n    while n:\n        n -= 1\n")
