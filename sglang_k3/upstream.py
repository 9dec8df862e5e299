"""Each hook on SGLang: what it changes, why, and when it can go. Nothing else in this package patches SGLang.

Two kinds: a `Hook` wraps a function through SGLang's HookRegistry, a `Change` edits a table SGLang reads.
`registration` puts them in place and looks whether each one took. This module imports the standard library
alone; what a hook needs is imported when it runs.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_k3.architectures import ARCHITECTURES, DRAFT_ARCHITECTURES, TEXT_ONLY_K3, architecture_of
from sglang_k3.platforms.served import served_device

logger = logging.getLogger(__name__)

VALIDATED_SGLANG = "0.5.23"


class UpstreamError(RuntimeError):
    """SGLang is not the version we hook, or a hook did not take. The message says which and what to do."""


@dataclass(frozen=True)
class Hook:
    """`around(original, *args, **kwargs)` runs in place of the function at `target` (dotted path)."""

    target: str
    around: Callable[..., Any]
    why: str
    until: str
    devices: tuple[str, ...] = ("cpu", "npu")


@dataclass(frozen=True)
class Change:
    """`apply` edits a table of SGLang's; `holds` says whether the edit is in force."""

    name: str
    apply: Callable[[], None]
    holds: Callable[[], bool]
    why: str
    until: str
    devices: tuple[str, ...] = ("cpu", "npu")


def attribute(path: str) -> Any:
    """The object at a dotted path; UpstreamError names a path that is gone."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise UpstreamError(
            f"SGLang has no {path} ({error}); sglang-k3 hooks SGLang {VALIDATED_SGLANG}: "
            f"pip install sglang=={VALIDATED_SGLANG}"
        ) from error


# --- hooks -------------------------------------------------------------------------------------------


def _verify() -> None:
    from sglang_k3.registration import verify

    verify()


def _model_class(original, model_config):
    _verify()
    architecture = architecture_of(model_config)
    modules = ARCHITECTURES | DRAFT_ARCHITECTURES
    if architecture not in modules:
        return original(model_config)
    module = importlib.import_module(modules[architecture])
    return getattr(module, architecture), architecture


def _attention_backend(original, runner, full_attn_backend):
    _verify()
    if served_device() == "npu":
        from sglang_k3.attention_backends.ascend import wrap
    else:
        from sglang_k3.attention_backends.hybrid import wrap

    return wrap(original, runner, full_attn_backend)


def _create_worker(original, algorithm, server_args):
    from sglang_k3.arguments import serves

    if not (algorithm.is_dspark() and serves(server_args)):
        return original(algorithm, server_args)
    from sglang_k3.speculative.dspark_worker import K3DSparkWorker

    return K3DSparkWorker


def _quantization_config(original, quantization):
    if quantization != "compressed-tensors":
        return original(quantization)
    from sglang_k3.moe.quantization import CompressedTensorsOrMxfp4

    return CompressedTensorsOrMxfp4


def _batch_invariant_mode(original, *args, **kwargs):
    logger.info("Exact mode runs on sglang-k3's row-invariant kernels; SGLang's Triton ones are left out.")


def _bind_threads(original, *, numa_index, world_size):
    from sglang_k3.platforms.cpu import bind_rank

    return bind_rank(numa_index, world_size)


def _prefill_checkpoint(original, batch, req):
    from sglang_k3.prefix_cache.checkpoints import prefill_checkpoint

    return prefill_checkpoint(original, batch, req)


def _decode_checkpoint(original, batch, track_positions=None):
    from sglang_k3.prefix_cache.checkpoints import decode_checkpoint

    decode_checkpoint(original, batch, track_positions)


def _process_results(original, scheduler, batch, result):
    from sglang_k3.broken_requests import end_broken
    from sglang_k3.prefix_cache.reporting import show_slots
    from sglang_k3.speculative.budget_report import show_budget

    end_broken(original, scheduler, batch, result)
    show_slots(scheduler)
    show_budget(scheduler)


def _add_one_req(original, adder, req, *rest, **named):
    from sglang_k3.prefix_cache.admission import add_one_req

    return add_one_req(original, adder, req, *rest, **named)


def _release_retracted(original, req, tree_cache, *, checkpoint):
    from sglang_k3.prefix_cache.retraction import release

    release(original, req, tree_cache, checkpoint=checkpoint)


def _mark_broken(original, scheduler, batch, *rest, **named):
    from sglang_k3.broken_requests import mark_broken

    return mark_broken(original, scheduler, batch, *rest, **named)


def _output_streamer_class(original, scheduler):
    from sglang_k3.prefix_cache.reporting import output_streamer_class
    from sglang_k3.speculative import budget_report

    return budget_report.output_streamer_class(output_streamer_class(original, scheduler), scheduler)


def _check_request(original, manager, obj, input_ids):
    from sglang_k3.request_rules import check_request

    return check_request(original, manager, obj, input_ids)


def _state_pool(original, pool, *args, **kwargs):
    from sglang_k3.speculative.state_pool import build_pool

    return build_pool(original, pool, *args, **kwargs)


def _plan_memory(original, planner, total_rest_memory):
    from sglang_k3.speculative.state_pool import plan_memory

    return plan_memory(original, planner, total_rest_memory)


def _update_weights(original, updater, model_path, *rest, **named):
    from sglang_k3.models.weight_update import update_from_disk

    return update_from_disk(original, updater, model_path, *rest, **named)


def _slots_of_a_request(original, planner):
    from sglang_k3.speculative.state_pool import slots_of_a_request

    return slots_of_a_request(original, planner)


def _plan_anchors(original, batch, mamba_track_interval, max_draft_tokens):
    from sglang_k3.prefix_cache.anchors import plan

    plan(original, batch, mamba_track_interval, max_draft_tokens)


def _anchor_crossed(original, processor, req, batch, i, crossed, track_seqlen):
    from sglang_k3.prefix_cache import anchors

    anchors.crossed(original, processor, req, batch, i, crossed, track_seqlen)


def _allow_dspark(original, server_args):
    from sglang_k3.arguments import allow_dspark

    return allow_dspark(original, server_args)


def _assign_token_slots(
    original, req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size
):
    from sglang_k3.platforms.token_slots import assign

    assign(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc)


def _last_token_slot(original, req_to_token, req_pool_indices_tensor, prefix_lens_tensor):
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


def _sampling_noise(original, seed, positions, col_indices):
    if seed.device.type != "cpu":
        return original(seed, positions, col_indices)
    from sglang_k3.platforms.murmur_hash import murmur_hash32

    return murmur_hash32(seed, positions, col_indices)


def _order_penalties(original, orchestrator, vocab_size, batch, penalizers):
    original(orchestrator, vocab_size, batch, sorted(penalizers, key=lambda penalizer: penalizer.__name__))


HOOKS = (
    Hook(
        "sglang.srt.model_loader.utils.get_model_architecture",
        _model_class,
        why="our classes answer for the Kimi architectures, and SGLang's model files need no import",
        until="SGLang lets a plugin register a single architecture before its model registry is imported",
    ),
    Hook(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        _attention_backend,
        why="the linear half of a hybrid backend is picked by config class, with no registry to add to",
        until="attention backends may supply their own wrapper for hybrid models",
    ),
    Hook(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode",
        _batch_invariant_mode,
        why="it replaces torch's CPU matmul by Triton kernels, which no CPU can launch",
        until="a platform can declare its own batch-invariant operators",
        devices=("cpu",),
    ),
    Hook(
        "sglang.srt.utils.numa_utils.init_threads_binding",
        _bind_threads,
        why="it asks for one NUMA node a rank, which no small machine has, and leaves the threads unbound "
        "without SGLang's own CPU kernels",
        until="a platform can bind its ranks",
        devices=("cpu",),
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend",
        _prefill_checkpoint,
        why="a chunk that starts off a page (--enable-mixed-chunk) keeps a state under a key shorter than "
        "the tokens it has seen, and a hit on it gives wrong text; a chunk of fewer than 64 tokens keeps "
        "none; a prompt that ends on a page keeps one that its repetition cannot use",
        until="SGLang cuts the checkpoint's depth to whole pages itself, and asks the backend for its grid",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.set_mamba_track_indices_from_reqs",
        _decode_checkpoint,
        why="a prefill between two overlapped decode steps makes a later boundary write over the kept state, "
        "which is then cached under its old depth",
        until="SGLang takes the buffer that is not kept",
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        _add_one_req,
        why="requests are admitted by tokens, and a pool short of state slots then ends the scheduler",
        until="the adder counts state slots in pools that are not shared with the KV cache",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.release_kv_cache",
        _release_retracted,
        why="a retracted request loses what it has computed since its prompt, and computes it again",
        until="retraction hands requests to the tree (SGLang's own note there)",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.run_batch",
        _mark_broken,
        why="NaN in one request's logits is stored in the prefix cache and handed on",
        until="SGLang ends such a request alone",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        _process_results,
        why="the request has to end with the step that broke, and the slots' gauges follow what ended",
        until="SGLang ends such a request alone",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class",
        _output_streamer_class,
        why="an answer says how much of its prompt was cached, and not what was lost for want of a state",
        until="stays: SGLang's seam for it, which it offers to subclasses of the scheduler only",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        _check_request,
        why="images sent to a text-only server are dropped without a word, and a token id outside the "
        "vocabulary ends the scheduler",
        until="SGLang refuses both",
    ),
    Hook(
        "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        _sampling_noise,
        why="seeded sampling on a CPU asks for SGLang's own kernel build, and its lack ends the scheduler",
        until="it asks whether that build is there, and has a form without it",
        devices=("cpu",),
    ),
    Hook(
        "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.__init__",
        _order_penalties,
        why="it walks a set of classes, whose order differs by process: two penalties of one request "
        "are added in either order, and its logprobs differ in the last bit from one server to the next",
        until="SGLang hands over a sequence",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner_components.weight_updater"
        ".WeightUpdater.update_weights_from_disk",
        _update_weights,
        why="new weights that do not fit are rolled back from the folder that does not fit, which ends the "
        "scheduler",
        until="SGLang reads the old folder",
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool._init_mamba_pool",
        _state_pool,
        why="a verify's scratch is one full KDA state for each drafted token; ours keeps replay records",
        until="the state pool class of a hybrid model can be registered",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
        _plan_memory,
        why="it reserves those full states, 30 times what the records take",
        until="the planner asks the pool class what a request costs",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._calculate_mamba_ratio",
        _slots_of_a_request,
        why="it counts tracking buffers for each request, which anchored states do without",
        until="the planner asks the pool class what a request costs",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.mamba_lazy_spec_prepare",
        _plan_anchors,
        why="it takes no cached state for the slot that a boundary needs, and an anchor that moves in its "
        "place leaves no checkpoint to a request that ends there",
        until="a strategy can be a class of its own",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._mamba_lazy_spec_update",
        _anchor_crossed,
        why="it keeps the boundary's state beside the request's own; an anchored request goes on from it",
        until="a strategy can be a class of its own",
    ),
    Hook(
        "sglang.srt.arg_groups.speculative_hook._handle_dspark",
        _allow_dspark,
        why="it refuses DSPARK on every device but CUDA, NPU and XPU, without asking the platform",
        until="it asks supports_speculative_algorithm",
        devices=("cpu",),
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        _assign_token_slots,
        why="it launches a Triton kernel wherever SGLang's own CPU kernels are not installed",
        until="a platform can supply it, as it can supply the speculative cache locations",
        devices=("cpu",),
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        _last_token_slot,
        why="it takes the Triton kernel for every backend but two, by name, although a torch form stands "
        "beside it",
        until="it asks the platform whether Triton runs, as its neighbours do",
        devices=("cpu",),
    ),
    Hook(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
        _create_worker,
        why="SGLang asks out-of-tree platforms alone for a worker, and its own on NPU keeps a whole state "
        "for each drafted token",
        until="the worker of an algorithm can be registered by model",
        devices=("npu",),
    ),
    Hook(
        "sglang.srt.layers.quantization.get_quantization_config",
        _quantization_config,
        why="SGLang asks out-of-tree platforms alone, and its compressed-tensors config refuses float32",
        until="a plugin can supply the config of a format",
        devices=("npu",),
    ),
)


# --- changes -----------------------------------------------------------------------------------------


def _configs() -> dict[str, str]:
    return {"kimi_linear": "K3TextConfig", "kimi_k3": "K3MultimodalConfig"}


def _register_configs() -> None:
    from sglang_k3.models import hf_config

    registry = attribute("sglang.srt.utils.hf_transformers.common._CONFIG_REGISTRY")
    for model_type, name in _configs().items():
        registry[model_type] = getattr(hf_config, name)


def _configs_registered() -> bool:
    from sglang_k3.models import hf_config

    registry = attribute("sglang.srt.utils.hf_transformers.common._CONFIG_REGISTRY")
    return all(registry[kind] is getattr(hf_config, name) for kind, name in _configs().items())


_ARCHITECTURE_SETS = ("_MAMBA_RADIX_CACHE_ARCHS", "_MAMBA_EXTRA_BUFFER_ARCHS")


def _add_text_only_k3() -> None:
    overrides = importlib.import_module("sglang.srt.arg_groups.overrides")
    for name in _ARCHITECTURE_SETS:
        present = attribute(f"sglang.srt.arg_groups.overrides.{name}")
        setattr(overrides, name, frozenset({*present, TEXT_ONLY_K3}))


def _text_only_k3_added() -> bool:
    overrides = importlib.import_module("sglang.srt.arg_groups.overrides")
    return all(TEXT_ONLY_K3 in getattr(overrides, name) for name in _ARCHITECTURE_SETS)


def _register_attention_backend() -> None:
    from sglang_k3.attention_backends import NAME

    register = attribute("sglang.srt.layers.attention.attention_registry.register_attention_backend")

    def create(runner):
        from sglang_k3.attention_backends.mla import K3MLABackend

        return K3MLABackend(runner)

    register(NAME)(create)
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    for adder in (
        "add_attention_backend_choices",
        "add_deterministic_attention_backend_choices",
        "add_radix_supported_deterministic_attention_backend_choices",
    ):
        add = attribute(f"{choices.__name__}.{adder}")
        add([NAME])


def _attention_backend_registered() -> bool:
    from sglang_k3.attention_backends import NAME

    return NAME in attribute("sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS")


def _backend_rule() -> tuple[str, Callable[..., None]]:
    """The step of SGLang's arguments that sets backends on this device, and our rule around it."""
    if served_device() == "npu":
        from sglang_k3.platforms import npu

        return "handle_npu_backends", npu.choose_backend
    from sglang_k3 import arguments

    return "handle_cpu_backends", arguments.choose_backend


def _register_argument_rules() -> None:
    from sglang_k3 import arguments

    hook = attribute("sglang.srt.arg_groups.resolution_hooks.register_resolution_hook")
    step, rule = _backend_rule()
    hook(step)(rule)
    hook("handle_other_validations")(arguments.refuse)


def _argument_rules_registered() -> bool:
    from sglang_k3 import arguments

    hooks = attribute("sglang.srt.arg_groups.resolution_hooks._HOOKS")
    step, rule = _backend_rule()
    return rule in hooks.get(step, ()) and arguments.refuse in hooks.get("handle_other_validations", ())


_ascend: dict[str, Any] = {}
"""SGLang's own factory of the name, and ours."""


def _wrap_ascend_backend() -> None:
    backends = attribute("sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS")
    stock = backends["ascend"]

    def create(runner):
        from sglang_k3.attention_backends import ascend

        return ascend.create(stock, runner)

    _ascend["ours"] = backends["ascend"] = create


def _ascend_backend_wrapped() -> bool:
    backends = attribute("sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS")
    return "ours" in _ascend and backends["ascend"] is _ascend["ours"]


def _register_prefix_cache() -> None:
    from sglang_k3.prefix_cache import backend

    backend.register()


def _prefix_cache_registered() -> bool:
    from sglang_k3.prefix_cache import backend

    return backend.registered()


def _pin_nothing(tensor, device=None):
    """Host memory is the device's memory here; pinning has nothing to pin for."""
    return tensor


def _replace_pin_memory() -> None:
    import torch

    torch.Tensor.pin_memory = _pin_nothing  # type: ignore[method-assign]


def _pin_memory_replaced() -> bool:
    import torch

    return torch.Tensor.pin_memory is _pin_nothing


CHANGES = (
    Change(
        "config classes",
        _register_configs,
        _configs_registered,
        why="SGLang reads a transformers-dialect Kimi Linear file as all-MLA, silently, and stores the conv "
        "window in bf16 whatever --dtype says",
        until="KimiLinearConfig maps layer_types and takes the window dtype from the model",
    ),
    Change(
        "mamba architecture sets",
        _add_text_only_k3,
        _text_only_k3_added,
        why=f"{TEXT_ONLY_K3} is in neither set, so its prefix cache would keep no states",
        until=f"SGLang lists {TEXT_ONLY_K3}",
    ),
    Change(
        "attention backend k3_cpu",
        _register_attention_backend,
        _attention_backend_registered,
        why="SGLang's public registry and argument choices",
        until="stays",
        devices=("cpu",),
    ),
    Change(
        "attention backend ascend",
        _wrap_ascend_backend,
        _ascend_backend_wrapped,
        why="SGLang sets this name on NPU for every model; ours answers to it for Kimi models",
        until="stays",
        devices=("npu",),
    ),
    Change(
        "argument rules",
        _register_argument_rules,
        _argument_rules_registered,
        why="SGLang's public resolution hooks: choose our backend for Kimi models, refuse what cannot work",
        until="stays",
    ),
    Change(
        "radix cache backends k3 and sglang, eviction policies, publishers of state events",
        _register_prefix_cache,
        _prefix_cache_registered,
        why="SGLang's public registries and argument choices",
        until="stays",
    ),
    Change(
        "torch.Tensor.pin_memory",
        _replace_pin_memory,
        _pin_memory_replaced,
        why="schedule_batch.py pins the track mask without asking the platform; torch refuses on a CPU",
        until="prepare_for_decode asks is_pin_memory_available",
        devices=("cpu",),
    ),
)
