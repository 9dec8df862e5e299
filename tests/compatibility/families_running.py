"""Flags about ranks, the scheduler, memory, the prefix cache and speculation."""

from __future__ import annotations

from tests.compatibility.families_model import ARGUMENTS, INERT, REFUSALS
from tests.compatibility.rows import Family, Outcome

FLAGS = "tests/server/test_flags.py"

FAMILIES = (
    Family(
        "Tensor and expert parallelism",
        Outcome.WORKS,
        "tp_size ep_size",
        "two ranks on one machine; more were planned and not run",
        shown_by=("tests/server/test_tensor_parallel.py",),
    ),
    Family(
        "Replicas in one server",
        Outcome.UNTRIED,
        "dp_size load_balance_method",
        "both schedulers of `--dp-size 2` came up and were asked nothing",
    ),
    Family(
        "Several nodes, chosen devices",
        Outcome.UNTRIED,
        "base_gpu_id numa_node nnodes node_rank dist_init_addr nccl_port dist_timeout gated_launch_port",
        "SGLang's own; this package takes no part",
    ),
    Family(
        "Pipeline parallelism",
        Outcome.REFUSED,
        "pp_size",
        settings="pp_max_micro_batch_size pp_async_batch_depth enable_dynamic_chunking",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Attention data parallelism",
        Outcome.REFUSED,
        "attn_dp_size enable_dp_attention",
        settings="enable_dp_attention_local_control_broadcast enable_dp_lm_head "
        "enable_tp_lm_head_all_to_all enable_dense_mlp_attn_tp disable_attn_tp_gather "
        "enable_prefill_delayer prefill_delayer_max_delay_passes "
        "prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets "
        "prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio "
        "prefill_delayer_max_delay_ms",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Context parallelism",
        Outcome.REFUSED,
        "attn_cp_size dcp_size enable_prefill_cp enable_kv_cache_sharding",
        settings="cp_strategy dcp_comm_backend dcp_replicate_q_proj enable_cp_tp_group_sharing "
        "enable_dsa_cache_layer_split enable_cp_decode_attn_tp",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Other splits of layers",
        Outcome.REFUSED,
        "moe_dp_size dwdp_size moe_dense_tp_size shared_experts_tp_size enable_shared_experts_attn_tp "
        "enable_layernorm_sp enable_attn_tp_input_scattered",
        settings="enable_megamoe_for_layernorm_sp",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Experts sent between ranks (DeepEP and others)",
        Outcome.REFUSED,
        "moe_a2a_backend enable_waterfill",
        settings="deepep_mode deepep_v2_mode deepep_config deepep_dispatcher_output_dtype fuseep_mode "
        "flashinfer_a2a_dispatch_type mooncake_ib_device",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Expert balancing, elastic experts",
        Outcome.REFUSED,
        "enable_eplb ep_num_redundant_experts init_expert_location ep_dispatch_algorithm "
        "elastic_ep_backend enable_elastic_expert_backup max_ep_size elastic_ep_initial_size "
        "expert_distribution_recorder_mode expert_balancedness_report_mode",
        settings="eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk "
        "eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_buffer_size "
        "ep_join_mode ep_join_rank_offset elastic_ep_scale_timeout",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Overlap of half batches",
        Outcome.REFUSED,
        "enable_two_batch_overlap enable_single_batch_overlap",
        settings="tbo_token_distribution_threshold",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Communication between GPUs",
        Outcome.INERT,
        "enable_nccl_nvls disable_custom_all_reduce enable_torch_symm_mem pre_warm_nccl "
        "enable_p2p_check enforce_disable_flashinfer_allreduce_fusion "
        "disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode "
        "enable_aiter_allreduce_fusion enable_symm_mem enable_mscclpp boundary_reduction",
        "ranks on a CPU add up by gloo",
        settings="enable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend",
        given=(
            "--enable-nccl-nvls",
            "--disable-custom-all-reduce",
            "--enable-torch-symm-mem",
            "--pre-warm-nccl",
            "--enable-p2p-check",
            "--enforce-disable-flashinfer-allreduce-fusion",
            "--disable-aiter-allreduce-fusion-in-prefill",
            "--disable-aiter-allreduce-fusion-in-decode",
            "--enable-aiter-allreduce-fusion",
            "--enable-symm-mem",
            "--enable-mscclpp",
            "--boundary-reduction=ar",
        ),
        shown_by=(INERT,),
    ),
    Family(
        "Prefill and decode in servers of their own",
        Outcome.REFUSED,
        "disaggregation_mode enable_pd_role_switch enable_pdmux",
        settings="disaggregation_decode_allocation_policy disaggregation_transfer_backend "
        "disaggregation_enable_kv_checksum disaggregation_bootstrap_port disaggregation_ib_device "
        "disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache "
        "disaggregation_decode_retraction_backup num_reserved_decode_tokens "
        "disaggregation_decode_extra_slots disaggregation_decode_polling_interval "
        "optimistic_prefill_attempts pdmux_config_path sm_group_num "
        "disaggregation_decode_host_receive_threshold",
        shown_by=(REFUSALS,),
    ),
    Family("Rounded communication", Outcome.REFUSED, "enable_quant_communications", shown_by=(REFUSALS,)),
    Family("Ray", Outcome.REFUSED, "use_ray", shown_by=(REFUSALS,)),
    Family(
        "Process and device numbers",
        Outcome.INERT,
        "gpu_id_step watchdog_timeout soft_watchdog_timeout gc_threshold",
        given=(
            "--gpu-id-step=2",
            "--watchdog-timeout=900",
            "--soft-watchdog-timeout=600",
            "--gc-threshold",
            "900",
            "20",
            "20",
        ),
        shown_by=(INERT,),
    ),
    Family(
        "Idle servers",
        Outcome.WORKS,
        "sleep_on_idle skip_server_warmup",
        "every server of the tests sleeps when idle",
        shown_by=("tests/server/test_clients.py", "tests/npu/cases_serving.py"),
    ),
    Family(
        "Pools and requests at once",
        Outcome.WORKS,
        "max_total_tokens max_running_requests max_mamba_cache_size page_size max_queued_requests",
        "a full pool waits or refuses, with the numbers",
        settings="mem_fraction_static mamba_full_memory_ratio",
        shown_by=(
            "tests/server/test_requests.py",
            "tests/server/test_exact_mode.py",
            "tests/planning/test_allocation.py",
            f"{FLAGS}::test_a_full_queue_refuses_a_request_and_names_itself",
        ),
    ),
    Family(
        "Chunks and mixed batches",
        Outcome.WORKS,
        "chunked_prefill_size enable_mixed_chunk disable_overlap_schedule",
        "the same bits in exact mode; mixed batches are refused beside a draft",
        shown_by=(
            "tests/server/test_exact_mode.py",
            "tests/server/test_speculation.py",
            f"{ARGUMENTS}::test_each_flag_that_cannot_work_is_refused_by_name",
        ),
    ),
    Family(
        "Order and pace of the scheduler",
        Outcome.WORKS,
        "schedule_policy schedule_conservativeness max_prefill_tokens prefill_max_requests "
        "prefill_decode_interval prefill_decode_interval_min_bs num_continuous_decode_steps "
        "scheduler_recv_interval min_free_slots_delay",
        "`--schedule-policy lpm` and these together: answers stay the same, bit for bit",
        given=(
            "--schedule-policy=lpm",
            "--schedule-conservativeness=0.5",
            "--max-prefill-tokens=512",
            "--prefill-max-requests=2",
            "--prefill-decode-interval=2",
            "--prefill-decode-interval-min-bs=1",
            "--num-continuous-decode-steps=2",
            "--scheduler-recv-interval=2",
            "--min-free-slots-delay=1",
        ),
        shown_by=(INERT,),
    ),
    Family(
        "Priorities",
        Outcome.WORKS,
        "enable_priority_scheduling priority_scheduling_preemption_threshold default_priority_value",
        "a request that is preempted answers with the same bits",
        settings="disable_priority_preemption abort_on_priority_when_disabled "
        "schedule_low_priority_values_first retraction_policy",
        shown_by=(f"{FLAGS}::test_a_higher_priority_goes_first_and_whom_it_displaces_answers_alike",),
    ),
    Family(
        "Prefix cache of KDA states",
        Outcome.WORKS,
        "radix_cache_backend mamba_radix_cache_strategy mamba_track_interval disable_radix_cache "
        "mamba_max_states_per_path",
        "k3 (the default) or sglang; no_buffer, extra_buffer, extra_buffer_lazy",
        settings="uses_mamba_radix_cache",
        shown_by=(
            "tests/server/test_prefix_cache.py",
            "tests/server/test_exact_mode.py",
            "tests/prefix_cache/test_inside.py",
            "tests/benchmarks/test_stages.py",
        ),
    ),
    Family(
        "Eviction",
        Outcome.WORKS,
        "radix_eviction_policy radix_eviction_policy_config",
        "value, marconi, path-lru, and SGLang's names; the first three are refused for other models and "
        "caches",
        settings="_radix_eviction_policy_explicitly_set",
        shown_by=(
            "tests/prefix_cache/test_eviction.py",
            "tests/prefix_cache/inside/cases_eviction.py",
            f"{ARGUMENTS}::test_each_flag_that_cannot_work_is_refused_by_name",
        ),
    ),
    Family(
        "State dtype",
        Outcome.WORKS,
        "mamba_ssm_dtype",
        "float32; bfloat16 where it is not exact mode and not an NPU",
        shown_by=(
            f"{ARGUMENTS}::test_each_flag_that_cannot_work_is_refused_by_name",
            "tests/planning/test_bytes.py",
        ),
    ),
    Family(
        "Other forms of states",
        Outcome.REFUSED,
        "enable_int8_mamba_checkpoint enable_mamba_cache_stochastic_rounding enable_unified_memory "
        "enable_page_major_kv_layout",
        settings="int8_mamba_ckpt_size mamba_cache_philox_rounds",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Hierarchical cache and external stores",
        Outcome.REFUSED,
        "enable_hierarchical_cache enable_unified_cache_external_linker enable_lmcache enable_flexkv "
        "enable_hisparse",
        "for other models on the CPU platform too where host and device memory are one",
        settings="hicache_host_memory_mode hicache_ratio hicache_size hicache_host_memory_fraction "
        "hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_backend "
        "hicache_storage_prefetch_policy hicache_storage_backend_extra_config "
        "hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts "
        "unified_cache_external_linker_backend unified_cache_external_linker_config "
        "enable_linker_mla_dedup hisparse_config lmcache_config_file flexkv_config_file",
        shown_by=(REFUSALS, f"{ARGUMENTS}::test_each_flag_that_cannot_work_is_refused_by_name"),
    ),
    Family(
        "Sessions",
        Outcome.WORKS,
        "enable_streaming_session",
        "`/open_session`, turns that append; refused with anchored records",
        shown_by=("tests/server/test_prefix_cache.py::test_sglangs_sessions_go_on_where_they_were",),
    ),
    Family(
        "References of sessions in the cache",
        Outcome.UNTRIED,
        "enable_session_radix_cache strip_thinking_cache",
        "they change what the cache keeps; no test here turns them on",
    ),
    Family(
        "Speculation with DSpark",
        Outcome.WORKS,
        "speculative_algorithm speculative_draft_model_path speculative_dspark_block_size "
        "speculative_num_draft_tokens",
        "a grouped-query draft, whose config says how long its block is (another length is refused); answers "
        "are the plain server's ([speculative_decoding.md](speculative_decoding.md))",
        settings="speculative_draft_model_revision speculative_boundary_reduction spec_trace_dir",
        shown_by=(
            "tests/server/test_speculation.py",
            "tests/speculative/test_inside.py",
            "tests/server/test_tensor_parallel.py::test_speculation_on_two_ranks_changes_no_bit",
        ),
    ),
    Family(
        "Files for SGLang's own verify budget, block verification",
        Outcome.REFUSED,
        "speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path "
        "speculative_use_block_verification",
        "the budget of `SGLANG_RAGGED_VERIFY_MODE=compact` measures by itself",
        shown_by=(f"{ARGUMENTS}::test_each_flag_that_cannot_work_is_refused_by_name",),
    ),
    Family(
        "Other drafts",
        Outcome.REFUSED,
        "speculative_adaptive enable_multi_layer_eagle speculative_token_map "
        "speculative_draft_window_size speculative_draft_sink_size speculative_draft_kv_cache_dtype "
        "speculative_draft_model_quantization speculative_accept_threshold_single "
        "speculative_accept_threshold_acc speculative_use_rejection_sampling uno_lora_path "
        "decoupled_spec_role speculative_num_steps speculative_eagle_topk",
        "`--speculative-algorithm` of another name too",
        settings="speculative_adaptive_config speculative_dflash_block_size "
        "speculative_domino_candidate_pool_size speculative_dsa_topk_backend "
        "speculative_enable_w4a4_mxfp4_megamoe _speculative_draft_quantization_explicitly_set "
        "speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth "
        "speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity "
        "speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget "
        "speculative_ngram_external_corpus_max_tokens decoupled_spec_bind_endpoint "
        "decoupled_spec_connect_endpoints decoupled_spec_rank",
        shown_by=(REFUSALS, f"{ARGUMENTS}::test_each_flag_that_cannot_work_is_refused_by_name"),
    ),
    Family(
        "How a draft is loaded and computed",
        Outcome.REFUSED,
        "speculative_draft_attention_backend speculative_attention_mode speculative_moe_runner_backend "
        "speculative_moe_a2a_backend speculative_dspark_align_verify_tokens_to_graph_tier "
        "speculative_draft_load_format",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Diffusion models",
        Outcome.REFUSED,
        "dllm_algorithm",
        settings="dllm_algorithm_config dllm_fdfo",
        shown_by=(REFUSALS,),
    ),
)
