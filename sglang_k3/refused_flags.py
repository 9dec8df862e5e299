"""SGLang flags that a server of a Kimi model refuses at start, and why.

What has no place in this release is refused where SGLang would pass over it in silence, or fail later with
less to say. What depends on another flag's value is refused in `arguments`, next to what it depends on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """Fields of SGLang's ServerArgs (their names, in one string) that may only be left alone.

    allowed: values beside SGLang's default that change nothing and may be given.
    """

    names: str
    why: str
    allowed: tuple[Any, ...] = ()


REFUSALS = (
    # Ways to spread a model over devices.
    Refusal("pp_size", "pipeline parallelism is not in this release: use --tp-size"),
    Refusal("attn_dp_size enable_dp_attention", "attention data parallelism is not in this release"),
    Refusal(
        "attn_cp_size dcp_size enable_prefill_cp enable_kv_cache_sharding",
        "context parallelism is not in this release",
    ),
    Refusal(
        "moe_dp_size dwdp_size moe_dense_tp_size shared_experts_tp_size enable_shared_experts_attn_tp "
        "enable_layernorm_sp enable_attn_tp_input_scattered",
        "layers are split by --tp-size and --ep-size alone",
    ),
    Refusal("enable_two_batch_overlap enable_single_batch_overlap", "the KDA backend takes whole batches"),
    Refusal("cpu_offload_gb offload_group_size", "weights stay on the device"),
    Refusal("enable_quant_communications", "ranks add up what they computed, unrounded"),
    Refusal("use_ray", "its workers were never run with this package"),
    # Prefill, decode, encoder and draft in servers of their own.
    Refusal(
        "disaggregation_mode enable_pd_role_switch enable_pdmux",
        "prefill/decode disaggregation is not in this release",
    ),
    Refusal("encoder_only language_only", "the text model has no encoder"),
    Refusal("decoupled_spec_role", "draft and target run in one server"),
    # Experts.
    Refusal("moe_runner_backend", "experts run on this package's kernels (`sglang-k3 doctor` names them)"),
    Refusal(
        "moe_a2a_backend speculative_moe_a2a_backend enable_waterfill",
        "ranks exchange sums, not tokens: use --ep-size",
        allowed=("none",),
    ),
    Refusal(
        "enable_eplb ep_num_redundant_experts init_expert_location ep_dispatch_algorithm elastic_ep_backend "
        "enable_elastic_expert_backup max_ep_size elastic_ep_initial_size",
        "each expert has one place, chosen at start",
        allowed=("none",),
    ),
    Refusal(
        "expert_distribution_recorder_mode expert_balancedness_report_mode enable_return_routed_experts",
        "the router keeps no record of its choices",
    ),
    Refusal(
        "enable_paged_experts kt_weight_path enable_w4a4_mxfp4_megamoe enforce_shared_experts_fusion",
        "experts stay on their rank as the checkpoint stores them",
    ),
    # Kernels.
    Refusal(
        "mamba_backend linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend "
        "linear_attn_verify_backend",
        "KDA layers run on this package's kernels (`sglang-k3 doctor` names them)",
    ),
    Refusal(
        "enable_linear_replayssm enable_linear_replayssm_spec",
        "it is a Triton kernel; replay records come with --speculative-algorithm DSPARK",
    ),
    Refusal(
        "enable_nvidia_megakernel enable_amd_monokernel enable_lean_attention",
        "it is a GPU's kernel",
        allowed=(False,),
    ),
    Refusal("enable_torch_compile", "kernels in numba and Triton cannot be traced"),
    Refusal("bf16_gemm_backend", "products run on this package's kernels", allowed=("torch",)),
    Refusal("sampling_backend", "tokens are drawn by torch", allowed=("pytorch", "ascend")),
    Refusal("enable_mis", "multi-item scoring needs flashinfer's attention"),
    # Weights and where they come from.
    Refusal("model_impl", "this package's classes serve them", allowed=("sglang",)),
    Refusal(
        "quantization modelopt_quant modelopt_checkpoint_restore_path "
        "modelopt_checkpoint_save_path modelopt_export_path rl_quant_profile",
        "weights are served as the checkpoint stores them, MXFP4 experts among them",
    ),
    Refusal("load_format", "checkpoints are read from safetensors files", allowed=("safetensors",)),
    Refusal(
        "startup_weight_load_mode weight_cache_mode checkpoint_engine_wait_weights_before_ready "
        "remote_instance_weight_loader_start_seed_via_transfer_engine modelexpress_config",
        "weights are read from the folder of --model-path, before the server is up",
    ),
    Refusal("custom_weight_loader", "loading is strict: every tensor is looked for by name", allowed=([],)),
    Refusal("enable_lora lora_paths", "LoRA is not in this release", allowed=(False,)),
    Refusal(
        "enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup",
        "giving memory back to sleep is not in this release",
    ),
    # KV, states and their cache.
    Refusal("kv_cache_dtype", "the latent cache is kept in the model's dtype"),
    Refusal("quantization_param_path", "the latent cache is kept in the model's dtype"),
    Refusal("enable_int8_mamba_checkpoint", "int8 states would break exact prefix hits"),
    Refusal("enable_mamba_cache_stochastic_rounding", "a state is never rounded at random"),
    Refusal("enable_unified_memory enable_page_major_kv_layout", "the shared pool layout is not supported"),
    Refusal("enable_hierarchical_cache", "KDA states have no copy on the host in this release"),
    Refusal("enable_lmcache enable_flexkv", "it would take the place of the cache that keeps KDA states"),
    Refusal("enable_unified_cache_external_linker", "it moves no replay records"),
    Refusal("enable_hisparse", "MLA layers attend to every token"),
    # What an answer holds.
    Refusal("is_embedding", "they have no pooling layer: their answers are tokens"),
    Refusal("dllm_algorithm", "they are no diffusion models"),
    Refusal("enable_fp32_lm_head", "the head runs on this package's kernels"),
    Refusal("enable_return_aux_hidden_states", "layers are tapped for a draft alone"),
    Refusal("enable_return_indexer_topk", "they have no indexer"),
    Refusal("enable_watermark", "SGLang marks texts on CUDA devices only"),
    Refusal("rl_on_policy_target", "training frameworks' numerics are not reproduced"),
    # Speculation.
    Refusal("speculative_algorithm", "this release speculates with DSPARK drafts only", allowed=("DSPARK",)),
    Refusal(
        "speculative_adaptive enable_multi_layer_eagle speculative_token_map speculative_draft_window_size "
        "speculative_draft_sink_size speculative_draft_kv_cache_dtype speculative_draft_model_quantization "
        "speculative_accept_threshold_single speculative_accept_threshold_acc "
        "speculative_use_rejection_sampling uno_lora_path",
        "it belongs to other drafts than DSPARK's",
    ),
    Refusal(
        "speculative_num_steps speculative_eagle_topk", "a step drafts one chain, a block long", allowed=(1,)
    ),
    Refusal(
        "speculative_draft_attention_backend speculative_attention_mode speculative_moe_runner_backend "
        "speculative_dspark_align_verify_tokens_to_graph_tier",
        "drafts run on this package's kernels",
    ),
    Refusal(
        "speculative_draft_load_format",
        "checkpoints are read from safetensors files",
        allowed=("auto", "safetensors"),
    ),
)


def check(server_args: Any, where: str) -> None:
    """Raises ValueError naming the first flag that was given a value it may not have.

    server_args: SGLang's ServerArgs of a Kimi model, whose attributes are what the user gave. where: the
    device in words, for the message.
    """
    from sglang.srt.arg_groups.arg_utils import record_fields

    defaults = {field.name: field.default for field in record_fields(type(server_args))}
    for refusal in REFUSALS:
        for name in refusal.names.split():
            value = getattr(server_args, name)
            if value != defaults[name] and value not in refusal.allowed:
                option = "--" + name.replace("_", "-")
                raise ValueError(
                    f"{option} {value} cannot work with Kimi models on {where}: {refusal.why}. Leave it out."
                )
