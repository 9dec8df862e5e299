"""How ranks share a model: which part of each module one rank holds, and how many rows it computes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_k3.models.config import MXFP4_GROUP, K3Config
from sglang_k3.models.dspark_config import DraftConfig
from sglang_k3.planning.errors import PlanError


@dataclass(frozen=True)
class Layout:
    """Each figure is the number of ranks that share the module; 1 means that every rank holds it whole.

    attention: KDA's heads. mla: MLA's query and value heads; as many ranks keep the same cache rows, because
    the latent cache has no heads. mla_output: its gate and output projection. mlp: the dense and the shared
    MLP. embedding, head: rows of the vocabulary. experts: ranges of experts; expert_rows: the inner rows of
    one expert. draft: the draft's layers.
    """

    ranks: int
    attention: int
    mla: int
    mla_output: int
    mlp: int
    embedding: int
    head: int
    experts: int
    expert_rows: int
    draft: int

    @property
    def groups(self) -> int:
        """Groups of ranks with requests of their own."""
        return self.ranks // self.mla

    def requests(self, concurrency: int, sharing: int) -> int:
        """Running requests of one rank, in modules whose cache or state `sharing` ranks have together."""
        return -(-concurrency * sharing // self.ranks)

    def rows(self, rows: float, sharing: int) -> float:
        """Rows that a rank computes in a module, of so many rows of a step."""
        return rows * max(sharing, self.mla) / self.ranks


def sglang_layout(config: K3Config, draft: DraftConfig | None, tp: int, dp: int, ep: int) -> Layout:
    """As this package's model shares itself under --tp-size, --dp-size (of attention) and --ep-size.

    Raises PlanError where a number doesn't divide, with the numbers that do.
    """
    for name, value in (("--tp", tp), ("--dp", dp), ("--ep", ep)):
        if value < 1:
            raise PlanError(f"{name} {value} must be at least 1")
        if tp % value:
            raise PlanError(f"{name} {value} does not divide --tp {tp}: pass one of {_divisors(tp)}")
    attention, expert_rows = tp // dp, tp // ep
    where = f"--tp {tp}" if dp == 1 else f"--tp {tp} with --dp {dp}"
    _shared(where, attention, "KDA heads", config.kda.num_heads)
    _shared(where, attention, "MLA heads", config.mla.num_heads)
    if len(config.moe_layers) < config.num_layers:
        _shared(where, tp, "columns of the dense MLP", config.intermediate_size)
    if draft is not None:
        _shared(where, attention, "attention heads of the draft", draft.num_heads)
        _shared(where, attention, "key/value heads of the draft", draft.num_kv_heads)
        _shared(where, attention, "columns of the draft's MLP", draft.intermediate_size)
    if config.moe is not None:
        _shared("--ep", ep, "experts", config.moe.num_experts)
        if config.moe.num_shared_experts:
            _shared(where, tp, "columns of the shared experts", config.moe.shared_intermediate_size)
        unit = MXFP4_GROUP if config.moe.packed else 1
        _shared(
            f"{where} and --ep {ep}", expert_rows, f"groups of {unit} columns of an expert",
            config.moe.intermediate_size // unit,
        )  # fmt: skip
    return Layout(
        ranks=tp,
        attention=attention,
        mla=attention,
        mla_output=attention,
        mlp=tp,
        embedding=tp,
        head=tp,
        experts=ep,
        expert_rows=expert_rows,
        draft=attention,
    )


def _shared(where: str, ranks: int, what: str, count: int) -> None:
    if count % ranks:
        raise PlanError(
            f"{where}: {ranks} ranks can't share {count} {what}: a divisor is wanted, one of "
            f"{_divisors(count)}"
        )


def _divisors(count: int) -> str:
    found = {d for low in range(1, math.isqrt(count) + 1) if count % low == 0 for d in (low, count // low)}
    return ", ".join(str(each) for each in sorted(found) if each <= 1024)
