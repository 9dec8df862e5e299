"""What one drafted token leaves behind of a KDA layer: a record's schema, part of the operators' contract.

`kda.verify` writes u, k and g, `short_conv.verify` writes x; the commits read them. Whoever allocates the
banks (speculative/replay_records.py) takes shapes and bytes from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Field:
    """One array of a record row: shape without the bank's leading dimensions."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def record_row(
    *,
    heads: int,
    value_dim: int,
    key_dim: int,
    channels: int,
    activation: torch.dtype,
    window: torch.dtype,
) -> tuple[Field, ...]:
    """The fields of one row of one layer, in the order the operators take them: u, k, g, then x.

    heads: of this rank. channels: of the convolution (q | k | v). activation: dtype that k arrives in;
    window: dtype that the convolution's window is stored in. Kimi K3 on one rank in bf16: u, k and g take
    122,880 bytes, x 73,728; the state they stand for takes 6,291,456.
    """
    return (
        Field("u", (heads, value_dim), torch.float32),
        Field("k", (heads, key_dim), activation),
        Field("g", (heads, key_dim), torch.float32),
        Field("x", (channels,), window),
    )
