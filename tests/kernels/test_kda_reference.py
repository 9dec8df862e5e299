"""The KDA oracle against code and formulas that are not ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import KimiLinearConfig
from transformers.models.kimi_linear import modeling_kimi_linear as theirs

from sglang_k3.kernels.kda import cpu, reference
from tests.kernels.kda_cases import extend, kda_inputs, oracle, states
from tests.kernels.spans import scaled_error, spans


def test_reference_is_the_papers_matrix_recurrence():
    """S_t = (I - beta k k^T) diag(d) S + beta k v^T and o = S^T q, with S [K, V], in fp64."""
    inputs = kda_inputs(9, heads=1, key_dim=5, value_dim=3)
    pool = states(inputs, 2)
    got, got_pool = oracle(inputs, pool, spans([9]))

    q, k, v, g, beta = (x[:, 0].double() for x in inputs.tensors)
    state = pool[1, 0].double().t()
    for t in range(9):
        key = k[t] / (k[t].square().sum() + 1e-6).sqrt()
        query = q[t] / (q[t].square().sum() + 1e-6).sqrt() * 5**-0.5
        keep = torch.eye(5, dtype=torch.float64) - beta[t] * torch.outer(key, key)
        state = keep @ torch.diag(g[t].exp()) @ state + beta[t] * torch.outer(key, v[t])
        torch.testing.assert_close(got[t, 0], state.t() @ query, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_pool[1, 0], state.t(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "rule", [theirs.recurrent_kimi_delta_attention, theirs.chunk_kimi_delta_attention], ids=["step", "chunk"]
)
def test_all_prefills_agree_with_transformers(rule):
    inputs = kda_inputs(130, heads=3, key_dim=32, value_dim=20)
    pool = states(inputs, 2)
    q, k, v, g, beta = (x.unsqueeze(0) for x in inputs.tensors)
    want, want_state = rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=pool[1:2].transpose(-1, -2),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    for function in (reference.extend, cpu.extend_recurrent, cpu.extend_chunk):
        after = pool.clone()
        got = extend(function, inputs, after, spans([130]))
        assert scaled_error(got, want[0]) < 3e-6
        assert scaled_error(after[1], want_state[0].transpose(-1, -2)) < 3e-6


def test_unbounded_gate_is_transformers_forget_gate():
    config = KimiLinearConfig(hidden_size=16, linear_head_dim=8, linear_num_heads=3)
    layer = theirs.KimiLinearForgetGate(config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
        x = 3 * torch.randn(1, 11, 16, generator=torch.Generator().manual_seed(1))
        f = layer.f_b_proj(layer.f_a_proj(x))[0]
        want = layer(x)[0]
        for gate in (reference.gate, cpu.gate):
            g, _ = gate(f, torch.zeros(11, 3), layer.A_log.flatten(), layer.dt_bias, None)
            assert scaled_error(g, want) < 1e-6


# SGLang's own kernel under Triton's interpreter, which has to be chosen before triton is imported. The
# interpreter can't follow the kernel module's alias of tl.exp, so the alias is taken again at call time.
_THEIR_DECODE = """
import json, sys, torch, triton.language as tl
from sglang.kernels.ops.attention.fla import fused_recurrent
fused_recurrent.exp = lambda x: tl.exp(x)
case = torch.load(sys.argv[1])
out = torch.full_like(case["v"], 7.0).unsqueeze(1)
for bound in (-5.0, None):
    state = case["pool"].clone()
    fused_recurrent.fused_recurrent_kda_packed_decode(
        torch.cat([case[name].flatten(1) for name in "qkv"], 1), case["f"], case["b"], case["A_log"],
        case["dt_bias"], case["scale"], state, out, case["slots"], use_qk_l2norm_in_kernel=True,
        lower_bound=bound)
    case[str(bound)] = (out[:, 0].clone(), state)
torch.save(case, sys.argv[1])
print(json.dumps("done"))
"""


def test_gate_and_decode_agree_with_sglangs_triton_kernel(tmp_path: Path):
    inputs = kda_inputs(4, heads=2, key_dim=60, value_dim=20)
    r = torch.Generator().manual_seed(5)
    case = {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "f": 3 * torch.randn(4, 120, generator=r),
        "b": torch.randn(4, 2, generator=r),
        "A_log": torch.randn(2, generator=r),
        "dt_bias": torch.randn(120, generator=r),
        "pool": states(inputs, 6),
        "slots": torch.tensor([3, -1, 0, 5]),
        "scale": inputs.scale,
    }
    path = tmp_path / "case.pt"
    torch.save(case, path)
    run = subprocess.run(
        [sys.executable, "-c", _THEIR_DECODE, str(path)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == "done"
    theirs_out = torch.load(path)
    for bound in (-5.0, None):
        want, want_pool = theirs_out[str(bound)]
        for gate, decode in ((reference.gate, reference.decode), (cpu.gate, cpu.decode)):
            pool = case["pool"].clone()
            g, beta = gate(case["f"], case["b"], case["A_log"], case["dt_bias"], bound)
            got = decode(inputs.q, inputs.k, inputs.v, g, beta, pool, case["slots"], inputs.scale)
            assert scaled_error(got, want) < 2e-6
            assert scaled_error(pool, want_pool) < 2e-6
