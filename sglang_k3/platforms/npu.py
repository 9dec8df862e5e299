"""Server arguments on Ascend NPUs, where SGLang's platform stays and our classes serve Kimi models."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_k3 import refused_flags
from sglang_k3.attention_backends.ascend import NAME
from sglang_k3.kernels.ascend import chip, has_mx

logger = logging.getLogger(__name__)


def choose_backend(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around SGLang's `handle_npu_backends`, which sets `ascend` over whatever the user asked for."""
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_k3.arguments import serves

    view = resolving_view(server_args)
    if view.device == "npu" and serves(server_args):
        for flag in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
            value = getattr(view, flag)
            if value not in (None, NAME):
                raise ValueError(
                    f"--{flag.replace('_', '-')} {value} cannot run Kimi models on an NPU: leave it out, or "
                    f"pass {NAME}"
                )
        refused_flags.check(server_args, "an NPU")
    previous(server_args)
    if view.device == "npu" and serves(server_args):
        _leave_graphs_out(server_args)
        _order_the_schedulers_writes()


def _order_the_schedulers_writes() -> None:
    """SGLang orders its scheduler's writes to the tables of slots behind a pass that reads them, but on other
    devices than CUDA only where this is set. Every process that it starts inherits the variable."""
    from sglang.srt.environ import envs

    if not envs.SGLANG_ENABLE_WAR_BARRIER.is_set():
        envs.SGLANG_ENABLE_WAR_BARRIER.set(True)


def _leave_graphs_out(server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    config = resolving_view(server_args).cuda_graph_config
    for phase in (Phase.DECODE, Phase.PREFILL):
        config = with_phase(config, phase, backend=Backend.DISABLED)
    logger.info("Kimi models run without NPU graphs in this release.")
    declare_resolution(server_args, "sglang-k3", cuda_graph_config=config)


def refuse(view: Any, config: Any) -> None:
    """Raises ValueError naming what a Kimi model cannot do on this NPU, and the remedy."""
    from sglang.srt.speculative.ragged_verify import RaggedVerifyMode, read_ragged_verify_mode

    from sglang_k3.speculative.record_forms import chosen

    if view.enable_deterministic_inference:
        raise ValueError(
            "--enable-deterministic-inference is not to be had on an NPU: no operator there is known to give "
            "a row the same bits in every batch. Leave it out, or serve with --device cpu."
        )
    if view.mamba_ssm_dtype == "bfloat16":
        raise ValueError(
            "--mamba-ssm-dtype bfloat16 rounds a state after every token, which the NPU's operators do once "
            "a step: leave it out."
        )
    quantization = getattr(config.hf_text_config, "quantization_config", None) or getattr(
        config.hf_config, "quantization_config", None
    )
    if quantization and quantization.get("format", "").startswith("mxfp4") and not has_mx():
        raise ValueError(
            f"this checkpoint's experts are MXFP4, a format of the Ascend 950 series, and this is {chip()}: "
            "serve it on a 950, or unpack the experts to bfloat16 (tests/npu/dense.py shows how)"
        )
    if view.speculative_algorithm is not None and chosen().anchored:
        raise ValueError(
            "SGLANG_K3_RECORDS=anchored looks at values on the host, which no step on an NPU may: unset it"
        )
    if view.speculative_algorithm is not None and read_ragged_verify_mode() is RaggedVerifyMode.COMPACT:
        raise ValueError(
            "SGLANG_RAGGED_VERIFY_MODE=compact budgets rows by times that the host sees, which say nothing "
            "of a device that works on by itself: unset it on an NPU"
        )
