"""What a block's bank contributes to every mix of that block, before the running sum is known."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Summary(NamedTuple):
    """Online-softmax state of M mixes over one bank.

    acc [M, T, D]: sum of exp(score - maximum) times the bank rows; maximum [M, T]: the largest score,
    -inf for an empty bank; total [M, T]: sum of exp(score - maximum). fp32 (fp64 for an fp64 bank).
    """

    acc: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor
