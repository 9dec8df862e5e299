"""As many tokens accepted a step as a benchmark asks for, whatever was drafted.

SGLang's own variables: SGLANG_SIMULATE_ACC_LEN, _METHOD and _TOKEN_MODE. Texts are worth nothing then; times
show what a draft of that quality would gain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from sglang.srt.environ import envs
from sglang.srt.speculative.spec_utils import sample_simulated_acc_len

from sglang_k3.speculative.acceptance import Accepted

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_SIMULATE_ACC_LEN"
TOKEN_MODE, _METHOD = "SGLANG_SIMULATE_ACC_TOKEN_MODE", "SGLANG_SIMULATE_ACC_METHOD"
_FIXED, REAL = "fixed", "real-draft-token"
_FIXED_TOKEN = 100
"""SGLang's, too: any id that every vocabulary has."""


class SimulatedAcceptance:
    """length: tokens a step, of which one is the target's; a fraction is met on average."""

    def __init__(self, length: float, method: str, mode: str, agree: Callable[[list[int]], torch.Tensor]):
        """agree: rank 0's values, for every rank."""
        self._length, self._method, self._mode, self._agree = length, method, mode, agree
        logger.warning("%s=%s: texts are made up, only times are worth reading.", VARIABLE, length)

    def accept(self, candidates: torch.Tensor, chosen: torch.Tensor) -> Accepted:
        """candidates [N, D]: anchor and drafts; chosen [N, D]: the target's token behind each of them."""
        width = candidates.shape[1]
        count = self._agree([sample_simulated_acc_len(self._length, self._method, width)])
        counts = count.expand(len(candidates))
        if self._mode == _FIXED:
            return Accepted(counts, torch.full_like(chosen, _FIXED_TOKEN))
        drafts = torch.cat([candidates[:, 1:], chosen[:, -1:]], 1)
        places = torch.arange(width, device=candidates.device)
        return Accepted(counts, torch.where(places < count - 1, drafts, chosen))


def asked() -> bool:
    return envs.SGLANG_SIMULATE_ACC_LEN.get() > 0


def check(budgeted: bool) -> None:
    """Raises ValueError for values that SGLang does not know, and for a budget, which may verify fewer rows
    than are to be accepted."""
    if not asked():
        return
    for variable, value, known in (
        (TOKEN_MODE, envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get(), (_FIXED, REAL)),
        (_METHOD, envs.SGLANG_SIMULATE_ACC_METHOD.get(), ("match-expected", "multinomial")),
    ):
        if value not in known:
            raise ValueError(f"{variable}={value}: pass one of {', '.join(known)}")
    if budgeted:
        raise ValueError(
            f"{VARIABLE}={envs.SGLANG_SIMULATE_ACC_LEN.get()} cannot work with "
            "SGLANG_RAGGED_VERIFY_MODE=compact, whose budget may verify fewer rows: unset one of them"
        )


def simulated(agree: Callable[[list[int]], torch.Tensor]) -> SimulatedAcceptance | None:
    """What this server was asked for; None: what is right is accepted."""
    if not asked():
        return None
    return SimulatedAcceptance(
        envs.SGLANG_SIMULATE_ACC_LEN.get(),
        envs.SGLANG_SIMULATE_ACC_METHOD.get(),
        envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get(),
        agree,
    )
