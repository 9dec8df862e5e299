"""Bytes that a verify step stores in what outlives it, counted at Kimi K3's shapes on 16 ranks.

Counted: every store of an operator into pools and banks. Not counted: temporaries, of which a fused kernel
has fewer than torch's operators. Written by a count, not by a device: no time is said.
"""

from __future__ import annotations

import torch

from sglang_k3.kernels.kda import ascend as kda
from sglang_k3.kernels.kda.record import record_row
from sglang_k3.kernels.short_conv import ascend as conv

HEADS, SIZE, ROWS, REQUESTS, SLOTS = 6, 128, 8, 2, 6
CHANNELS = 3 * HEADS * SIZE
STATE = HEADS * SIZE * SIZE * 4


def count(emulator, accepted: int) -> dict[str, int]:
    """Bytes by name, a layer and request, of one verify and its commit."""
    npu = {"device": "npu", "dtype": torch.float32}
    state, window = (
        torch.randn(SLOTS, HEADS, SIZE, SIZE, **npu),
        torch.randn(SLOTS, 3, CHANNELS, **npu).bfloat16(),
    )
    row = record_row(
        heads=HEADS,
        value_dim=SIZE,
        key_dim=SIZE,
        channels=CHANNELS,
        activation=torch.bfloat16,
        window=torch.bfloat16,
    )
    banks = {f.name: torch.zeros(4, ROWS, *f.shape, dtype=f.dtype, device="npu") for f in row}
    slots, rows = torch.tensor([3, 5], device="npu"), torch.tensor([1, 2], device="npu")
    cu_seqlens = torch.arange(REQUESTS + 1, device="npu") * ROWS
    none, zero = torch.full_like(slots, -1), torch.zeros_like(slots)
    tokens = REQUESTS * ROWS
    q, k, v = (torch.randn(tokens, HEADS, SIZE, **npu).bfloat16() for _ in range(3))
    g, beta = -torch.rand(tokens, HEADS, SIZE, **npu), torch.rand(tokens, HEADS, **npu)
    x, taps = torch.randn(tokens, CHANNELS, **npu).bfloat16(), torch.randn(CHANNELS, 4, **npu)
    counts = torch.full_like(slots, accepted)
    ring = banks["u"], banks["k"], banks["g"]
    with emulator.logging() as log:
        log.watch("state", state)
        log.watch("window", window)
        for name, bank in banks.items():
            log.watch(f"record {name}", bank)
        conv.verify(x, taps, window, slots, cu_seqlens, rows, banks["x"])
        kda.verify(
            q, k, v, g, beta, state, slots, cu_seqlens, rows, *ring, zero, zero, none, SIZE**-0.5, width=ROWS
        )
        drafted = dict(log.stored)
        kda.commit(
            state[None],
            slots,
            slots,
            rows,
            *(b[None] for b in ring),
            zero,
            counts,
            none,
            none,
            tracking=False,
        )
        conv.commit(
            window[None], slots, rows, banks["x"][None], counts, window[None], none, none, tracking=False
        )
    assert drafted.get("state", 0) == 0, "a drafted row wrote a state"
    assert drafted.get("window", 0) == 0, "a drafted row wrote a window"
    return {name: stored // REQUESTS for name, stored in log.stored.items()}


def test_a_verify_stores_records_and_one_state(emulator, capsys):
    counted = count(emulator, accepted=4)
    records = sum(counted[f"record {name}"] for name in "ukg")
    conv_rows = counted["record x"]
    # SGLang's in-tree path: a state a drafted row, the accepted one copied into the slot; the drafted rows
    # in the live window, and the window written again by the roll-back (ascend_kda_backend.py).
    in_tree_states, window = ROWS * STATE, 3 * CHANNELS * 2
    in_tree = in_tree_states + STATE + ROWS * CHANNELS * 2 + window
    ours = sum(counted.values())
    with capsys.disabled():
        print(f"\nbytes a layer and request, {ROWS} rows, 6 heads of 128: ", end="")
        print(f"states for drafted rows 0 (in-tree {in_tree_states}), records {records}, ", end="")
        print(f"conv rows {conv_rows}, ", end="")
        print(f"whole step {ours} (in-tree {in_tree}, {in_tree / ours:.2f} times)")
    assert counted["state"] == STATE and counted["window"] == window
    assert records * 40 <= in_tree_states
    assert ours * 7 <= in_tree


def test_what_is_stored_does_not_grow_with_what_is_accepted(emulator):
    assert count(emulator, 1) == count(emulator, ROWS)
