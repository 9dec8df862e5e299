"""Server arguments on the CPU platform: choose our backend for Kimi models, refuse what cannot work.

Each refusal names the flag, its value and the remedy, before a process is started or a weight is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_k3.attention_backends import NAME
from sglang_k3.upstream import ARCHITECTURES, PLUGIN


def _architecture(server_args: Any) -> str:
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return (model_config_of(server_args).hf_config.architectures or [""])[0]


def refuse_without_plugin(server_args: Any) -> None:
    """Raises ValueError for a Kimi model when SGLANG_PLUGINS leaves our general plugin out."""
    architecture = _architecture(server_args)
    if architecture in ARCHITECTURES:
        raise ValueError(
            f"{architecture} on a CPU needs the plugin {PLUGIN}, which SGLANG_PLUGINS leaves out: "
            f"add {PLUGIN} to it, or unset it"
        )


def choose_backend(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around SGLang's `handle_cpu_backends`, which would take intel_amx for every model."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    ours = _architecture(server_args) in ARCHITECTURES
    for flag in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        value = getattr(view, flag)
        option = "--" + flag.replace("_", "-")
        if ours and value not in (None, NAME):
            raise ValueError(
                f"{option} {value} cannot run Kimi models on a CPU: leave it out, or pass {NAME}"
            )
        if not ours and value == NAME:
            raise ValueError(f"{option} {NAME} runs Kimi models only: leave it out, or pass torch_native")
    if view.attention_backend is None:
        declare_resolution(server_args, "sglang-k3", attention_backend=NAME if ours else "torch_native")
    previous(server_args)


def refuse(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around SGLang's last validation step: every flag has its final value."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolving_view

    previous(server_args)
    view = resolving_view(server_args)
    if view.enable_hierarchical_cache:
        raise ValueError(
            "--enable-hierarchical-cache cannot work on the CPU platform: host and device memory are one. "
            "Leave it out."
        )
    config = model_config_of(server_args)
    if _architecture(server_args) not in ARCHITECTURES:
        return
    if view.enable_deterministic_inference and str(config.dtype) != "torch.float32":
        raise ValueError(
            f"--enable-deterministic-inference is exact in float32 only, not in {config.dtype}: "
            "add --dtype float32."
        )
    if config.is_multimodal:
        raise ValueError(
            "this release serves Kimi K3's text model only: add --json-model-override-args "
            "'{\"language_model_only\": true}' (images are then refused per request)."
        )
    for flag, allowed, why in (
        ("speculative_algorithm", (None,), "speculative decoding is not in this release"),
        ("pp_size", (1,), "pipeline parallelism is not in this release: use --tp-size"),
        ("enable_dp_attention", (False,), "attention data parallelism is not in this release"),
        ("disaggregation_mode", ("null",), "prefill/decode disaggregation is not in this release"),
        ("enable_lora", (None, False), "LoRA is not in this release"),
        ("enable_linear_replayssm", (False,), "the decode ring is a Triton kernel"),
        ("enable_linear_replayssm_spec", (False,), "the verify ring is a Triton kernel"),
        ("enable_int8_mamba_checkpoint", (False,), "int8 states would break exact prefix hits"),
        ("enable_unified_memory", (False,), "the shared pool layout is not supported"),
        ("enable_two_batch_overlap", (False,), "a CPU has no second stream to overlap with"),
        ("cpu_offload_gb", (0,), "host and device memory are one"),
        ("kv_cache_dtype", ("auto",), "the latent cache is kept in the model's dtype"),
        ("mamba_ssm_dtype", (None, "float32", "bfloat16"), "a state is float32, or bfloat16 if asked"),
    ):
        value = getattr(view, flag)
        if value not in allowed:
            raise ValueError(
                f"--{flag.replace('_', '-')} {value} cannot work with Kimi models on the CPU platform: {why}."
            )
    if view.enable_deterministic_inference and view.mamba_ssm_dtype == "bfloat16":
        raise ValueError(
            "--mamba-ssm-dtype bfloat16 is not exact: leave it out with --enable-deterministic-inference."
        )
    if str(config.dtype) == "torch.float16":
        raise ValueError(
            "Kimi models run in float32 or bfloat16 on a CPU, not in float16 (which --dtype auto takes for a "
            "float32 checkpoint): add --dtype float32."
        )
