"""How many threads numba's next parallel region gets."""

from __future__ import annotations

import numba

from sglang_k3.kernels.row_math import use_torch_threads

_WORTH_A_REGION = 1 << 16


def use_threads_for(work: int) -> None:
    """As many threads as torch uses, or one where the region handles fewer than 65,536 numbers.

    Waking and joining threads costs several microseconds (milliseconds on a busy machine), more than
    a decode step's norms and activations take. The count never changes a result here.
    """
    if work < _WORTH_A_REGION:
        numba.set_num_threads(1)
    else:
        use_torch_threads()
