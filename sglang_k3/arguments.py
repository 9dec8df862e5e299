"""Server arguments on the CPU platform: choose our backend for Kimi models, refuse what cannot work.

Each refusal names the flag, its value and the remedy, before a process is started or a weight is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_k3 import refused_flags
from sglang_k3.architectures import ARCHITECTURES, architecture_of
from sglang_k3.attention_backends import NAME
from sglang_k3.kernels import order
from sglang_k3.prefix_cache import backend, eviction
from sglang_k3.registration import PLUGIN

_LAZY = "extra_buffer_lazy"

_TRACK_INTERVAL = 256
"""SGLang's default."""


def _architecture(server_args: Any) -> str:
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return architecture_of(model_config_of(server_args))


def serves(server_args: Any) -> bool:
    """Whether the model is one of ours."""
    return _architecture(server_args) in ARCHITECTURES


def refuse_without_plugin(server_args: Any) -> None:
    """Raises ValueError for a Kimi model when SGLANG_PLUGINS leaves our general plugin out."""
    if serves(server_args):
        raise ValueError(
            f"{_architecture(server_args)} on a CPU needs the plugin {PLUGIN}, which SGLANG_PLUGINS leaves "
            f"out: add {PLUGIN} to it, or unset it"
        )


def choose_backend(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around SGLang's `handle_cpu_backends`, which would take intel_amx for every model."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    ours = serves(server_args)
    for flag in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        value = getattr(view, flag)
        option = "--" + flag.replace("_", "-")
        if ours and value not in (None, NAME):
            raise ValueError(
                f"{option} {value} cannot run Kimi models on a CPU: leave it out, or pass {NAME}"
            )
        if not ours and value == NAME:
            raise ValueError(f"{option} {NAME} runs Kimi models only: leave it out, or pass torch_native")
    if ours:
        refused_flags.check(server_args, "the CPU platform")
    if view.attention_backend is None:
        declare_resolution(server_args, "sglang-k3", attention_backend=NAME if ours else "torch_native")
    previous(server_args)


def refuse(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around SGLang's last validation step: every flag has its final value. Kimi models get our prefix
    cache here, and not before: SGLang refuses some flags beside a cache that is not its own, with less to
    say than we have."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    previous(server_args)
    view = resolving_view(server_args)
    npu = view.device == "npu"
    where = "an NPU" if npu else "the CPU platform"
    if view.enable_hierarchical_cache and not npu:
        raise ValueError(
            "--enable-hierarchical-cache cannot work on the CPU platform: host and device memory are one. "
            "Leave it out."
        )
    config = model_config_of(server_args)
    ours = serves(server_args)
    _check_eviction(view, ours)
    _check_events(view, ours)
    if not ours:
        if view.radix_cache_backend == backend.NAME:
            raise ValueError(
                f"--radix-cache-backend {backend.NAME} keeps the states of Kimi models only: leave it out"
            )
        return
    order.check(view.device)
    if npu:
        from sglang_k3.platforms.npu import refuse as refuse_on_npu

        refuse_on_npu(view, config)
    if view.radix_cache_backend is None:
        declare_resolution(server_args, "sglang-k3", radix_cache_backend=backend.NAME)
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
    if view.mamba_ssm_dtype not in (None, "float32", "bfloat16"):
        raise ValueError(
            f"--mamba-ssm-dtype {view.mamba_ssm_dtype} cannot work with Kimi models on {where}: a state is "
            "float32, or bfloat16 if asked."
        )
    if view.speculative_algorithm is not None:
        _check_speculation(server_args, view)
        _check_draft(view, config)
        if view.min_free_slots_delay is None:
            # SGLang lets requests wait until several rows are free, because with DFlash drafts a prefill is
            # dear. Ours needs none of its own; one that waits would run behind the others, not beside them.
            declare_resolution(server_args, "sglang-k3", min_free_slots_delay=1)
    if view.enable_deterministic_inference and view.mamba_ssm_dtype == "bfloat16":
        raise ValueError(
            "--mamba-ssm-dtype bfloat16 is not exact: leave it out with --enable-deterministic-inference."
        )
    if str(config.dtype) == "torch.float16":
        raise ValueError(
            f"Kimi models run in float32 or bfloat16 on {where}, not in float16 (which --dtype auto takes "
            "for a float32 checkpoint): add --dtype float32."
        )


def _check_eviction(view: Any, ours: bool) -> None:
    """Raises ValueError for an eviction policy of ours beside another cache or model, or a wrong setting of
    it."""
    policy = view.radix_eviction_policy
    if policy not in eviction.OURS:
        return
    if not ours or view.radix_cache_backend not in (None, backend.NAME):
        raise ValueError(
            f"--radix-eviction-policy {policy} orders the KDA states of Kimi models, in the cache of "
            f"--radix-cache-backend {backend.NAME}: leave it out, or pass one of SGLang's own"
        )
    eviction.check(policy, view.radix_eviction_policy_config)


def _check_events(view: Any, ours: bool) -> None:
    """Raises ValueError for state events beside another cache or model, or a wrong setting of them."""
    from sglang_k3.prefix_cache import events_publisher

    mode = events_publisher.mode_of(view.kv_events_config)
    if mode is None:
        return
    if not ours or view.radix_cache_backend not in (None, backend.NAME):
        raise ValueError(
            f"--kv-events-config publisher {mode} tells of the KDA states of Kimi models, in the cache of "
            f"--radix-cache-backend {backend.NAME}: pass zmq for SGLang's events"
        )
    events_publisher.with_token_ids(view.kv_events_config)
    events_publisher.batches_per_second(view.kv_events_config)


def _check_speculation(server_args: Any, view: Any) -> None:
    """Raises ValueError for what the speculative worker of this release does not do."""
    from sglang.srt.speculative.ragged_verify import RaggedVerifyMode, read_ragged_verify_mode

    from sglang_k3.speculative import simulated_acceptance
    from sglang_k3.speculative.record_forms import chosen

    mode = read_ragged_verify_mode()
    if mode is RaggedVerifyMode.CAP_ACCEPT:
        raise ValueError(
            f"SGLANG_RAGGED_VERIFY_MODE={mode.value} verifies rows that it does not accept: unset it or pass "
            "compact for a budget, or static for every row"
        )
    simulated_acceptance.check(budgeted=mode is RaggedVerifyMode.COMPACT)
    if chosen().anchored:
        _anchor(server_args, view)
    for flag, why in (
        ("enable_return_hidden_states", "a speculative step keeps no hidden states of accepted tokens"),
        ("enable_mixed_chunk", "a prompt's rows and a verify's are batches of their own"),
        ("speculative_use_block_verification", "drafts are accepted one by one"),
        ("speculative_dspark_sps_table_path", "the verify budget measures what a row costs itself"),
        (
            "speculative_dspark_confidence_sts_path",
            "the verify budget scales confidences by what is accepted",
        ),
    ):
        value = getattr(view, flag)
        if value:
            raise ValueError(
                f"--{flag.replace('_', '-')} {value} does not work with --speculative-algorithm DSPARK: "
                f"{why}. Leave it out."
            )


def _anchor(server_args: Any, view: Any) -> None:
    """Anchored records bring a way of their own to keep states for the prefix cache. Raises ValueError for
    another one that was asked for, and for pages that do not end at the anchors' boundaries."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    from sglang_k3.speculative.record_forms import BOUNDARY, VARIABLE

    form = f"{VARIABLE}=anchored"
    # What the flag was left at: its resolved value no longer says whether it was passed.
    strategy = server_args.mamba_radix_cache_strategy
    if strategy not in ("auto", _LAZY):
        raise ValueError(f"--mamba-radix-cache-strategy {strategy} cannot work with {form}: leave it out")
    if server_args.mamba_track_interval not in (_TRACK_INTERVAL, BOUNDARY):
        raise ValueError(
            f"--mamba-track-interval {server_args.mamba_track_interval} cannot work with {form}, whose "
            f"states are those of every {BOUNDARY} tokens: leave it out"
        )
    if BOUNDARY % view.page_size:
        raise ValueError(
            f"--page-size {view.page_size} cannot work with {form}: a boundary of {BOUNDARY} tokens has to "
            "end a page. Pass a divisor of it"
        )
    for flag in ("disable_overlap_schedule", "disable_radix_cache", "enable_streaming_session"):
        if getattr(view, flag):
            raise ValueError(
                f"--{flag.replace('_', '-')} does not work with {form}: leave it out, or unset the variable"
            )
    declare_resolution(
        server_args, "sglang-k3", mamba_radix_cache_strategy=_LAZY, mamba_track_interval=BOUNDARY
    )


def _check_draft(view: Any, target: Any) -> None:
    """Raises ConfigError for a draft that this target cannot use; both configs are named."""
    from transformers import PretrainedConfig

    from sglang_k3.models.config import ConfigError, K3Config
    from sglang_k3.models.dspark_config import ARCHITECTURE, DraftConfig

    path = view.speculative_draft_model_path
    values, _ = PretrainedConfig.get_config_dict(path, revision=view.speculative_draft_model_revision)
    architecture = (values.get("architectures") or [None])[0]
    try:
        if architecture != ARCHITECTURE:
            raise ConfigError(
                f"its architecture is {architecture}; this release drafts with {ARCHITECTURE} only"
            )
        text = K3Config.from_hf(target.hf_config)
        draft = DraftConfig.from_file(values)
        draft.check_target(
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            num_layers=text.num_layers,
            max_positions=target.context_len,
        )
        if view.speculative_num_draft_tokens != draft.gamma + 1:
            raise ConfigError(
                f"its block has {draft.gamma} drafts, --speculative-dspark-block-size or "
                f"--speculative-num-draft-tokens asks for {view.speculative_num_draft_tokens - 1}: leave "
                "both out"
            )
    except ConfigError as error:
        raise ConfigError(
            f"--speculative-draft-model-path {path} for --model-path {view.model_path}: {error}"
        ) from error


def allow_dspark(original: Callable[[Any], None], server_args: Any) -> None:
    """AROUND hook on SGLang's argument step for DSPARK, whose check of the device names three devices."""
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.arg_groups.overrides import resolving_view

    if not serves(server_args):
        raise ValueError(
            f"DSPARK on the CPU platform verifies Kimi models only, not {_architecture(server_args)}: leave "
            "--speculative-algorithm out"
        )
    view = resolving_view

    class OnCuda:
        """The view with a device that the step lets through; everything else it asks is answered as it is."""

        def __init__(self, args: Any) -> None:
            self._view = view(args)

        def __getattr__(self, name: str) -> Any:
            return "cuda" if name == "device" else getattr(self._view, name)

    speculative_hook.resolving_view = OnCuda  # type: ignore[assignment]
    try:
        original(server_args)
    finally:
        speculative_hook.resolving_view = view
