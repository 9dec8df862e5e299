"""Flags about weights, numbers, kernels and devices."""

from __future__ import annotations

from tests.compatibility.rows import Family, Outcome

ARGUMENTS = "tests/server/test_arguments.py"
REFUSALS = f"{ARGUMENTS}::test_each_flag_that_may_only_be_left_alone_is_refused"
INERT = "tests/server/test_flags.py::test_flags_that_change_nothing_change_nothing"

FAMILIES = (
    Family(
        "Model",
        Outcome.WORKS,
        "model_path json_model_override_args context_length device",
        "`--device cpu`; an NPU emulated only ([ascend.md](ascend.md)). A prompt over the context is refused "
        "with both numbers",
        shown_by=("tests/server/test_requests.py", f"{ARGUMENTS}::test_each_model_gets_its_backend"),
    ),
    Family(
        "Vision",
        Outcome.REFUSED,
        "language_only encoder_only",
        "the text model alone is served: a checkpoint with a vision tower needs `--json-model-override-args "
        "'{\"language_model_only\": true}'`, and images are refused per request",
        settings="enable_mm_global_cache mm_enable_dp_encoder language_model_only enable_multimodal "
        "mm_attention_backend enable_broadcast_mm_inputs_process enable_prefix_mm_cache "
        "mm_process_config mm_processor_worker_num mm_io_worker_num allowed_media_domains "
        "media_url_max_file_size_mb mm_preprocess_cache_size_mb trust_mm_content_hashes "
        "limit_mm_data_per_request image_processor_backend mm_global_cache_backend "
        "disable_fast_image_processor mm_feature_transport encoder_transfer_backend encoder_urls "
        "encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder "
        "asr_max_buffer_seconds asr_max_concurrent_sessions",
        shown_by=(
            REFUSALS,
            f"{ARGUMENTS}::test_each_flag_that_cannot_work_is_refused_by_name",
            "tests/server/test_requests.py::test_an_image_is_refused_with_a_clear_error",
        ),
    ),
    Family(
        "Data type",
        Outcome.WORKS,
        "dtype",
        "float32 and bfloat16; float16 is refused",
        shown_by=(
            "tests/server/test_fast_mode.py",
            "tests/server/test_exact_mode.py",
            f"{ARGUMENTS}::test_each_flag_that_cannot_work_is_refused_by_name",
        ),
    ),
    Family(
        "Exact mode",
        Outcome.WORKS,
        "enable_deterministic_inference",
        "in float32, to the bit ([numerics.md](numerics.md)); refused in bfloat16, with a bfloat16 state, "
        "and on an NPU",
        shown_by=(
            "tests/server/test_exact_mode.py",
            f"{ARGUMENTS}::test_each_flag_that_cannot_work_is_refused_by_name",
        ),
    ),
    Family(
        "On-policy training",
        Outcome.REFUSED,
        "rl_on_policy_target",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Quantization",
        Outcome.REFUSED,
        "quantization modelopt_quant modelopt_checkpoint_restore_path modelopt_checkpoint_save_path "
        "modelopt_export_path rl_quant_profile quantization_param_path",
        "a checkpoint's own MXFP4 experts are served packed, without a flag",
        settings="quantize_and_serve",
        shown_by=(REFUSALS, "tests/server/test_exact_mode.py"),
    ),
    Family(
        "KV cache dtype",
        Outcome.REFUSED,
        "kv_cache_dtype",
        "anything but auto",
        settings="prefill_kv_cache_dequant_dtype",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Formats of weights",
        Outcome.REFUSED,
        "load_format model_impl custom_weight_loader",
        "anything but safetensors files read by this package's strict loader",
        shown_by=(REFUSALS, "tests/models/test_weights.py"),
    ),
    Family(
        "Weights from elsewhere",
        Outcome.REFUSED,
        "startup_weight_load_mode weight_cache_mode checkpoint_engine_wait_weights_before_ready "
        "remote_instance_weight_loader_start_seed_via_transfer_engine modelexpress_config",
        settings="weight_cache_socket weight_cache_timeout remote_instance_weight_loader_backend "
        "remote_instance_weight_loader_seed_instance_ip "
        "remote_instance_weight_loader_send_weights_group_ports "
        "remote_instance_weight_loader_seed_instance_service_port engine_info_bootstrap_port",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Reading files",
        Outcome.INERT,
        "weight_loader_disable_mmap weight_loader_prefetch_checkpoints "
        "weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load "
        "model_loader_extra_config trust_remote_code model_config_parser",
        "they change how files are read, not what is served",
        given=(
            "--weight-loader-disable-mmap",
            "--weight-loader-prefetch-checkpoints",
            "--weight-loader-prefetch-num-threads=2",
            "--weight-loader-drop-cache-after-load",
            '--model-loader-extra-config={"enable_multithread_load": true}',
            "--trust-remote-code",
            "--model-config-parser=hf",
        ),
        shown_by=(INERT,),
    ),
    Family(
        "Model hub, encrypted and checked files",
        Outcome.UNTRIED,
        "revision download_dir model_checksum decrypted_config_file decrypted_draft_config_file "
        "delete_ckpt_after_loading",
        "SGLang's own; tests serve folders on disk",
    ),
    Family(
        "LoRA",
        Outcome.REFUSED,
        "enable_lora lora_paths",
        settings="enable_lora_overlap_loading max_lora_rank lora_target_modules max_loaded_loras "
        "max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size "
        "experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading "
        "lora_drain_wait_threshold",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Memory saver, sleep",
        Outcome.REFUSED,
        "enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Weights and layers on the host",
        Outcome.REFUSED,
        "cpu_offload_gb offload_group_size enable_paged_experts kt_weight_path",
        settings="offload_num_in_group offload_prefetch_step offload_mode paged_experts_num_resident "
        "kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Attention backend",
        Outcome.WORKS,
        "attention_backend prefill_attention_backend decode_attention_backend",
        "k3_cpu, or left out (ascend on an NPU); any other is refused by name",
        shown_by=(
            f"{ARGUMENTS}::test_each_model_gets_its_backend",
            f"{ARGUMENTS}::test_each_flag_that_cannot_work_is_refused_by_name",
        ),
    ),
    Family(
        "Kernels of linear attention",
        Outcome.REFUSED,
        "mamba_backend linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend "
        "linear_attn_verify_backend enable_linear_replayssm enable_linear_replayssm_spec",
        settings="linear_replayssm_cache_len",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Kernels of products and experts",
        Outcome.REFUSED,
        "bf16_gemm_backend moe_runner_backend enable_w4a4_mxfp4_megamoe enforce_shared_experts_fusion",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Fused and compiled models",
        Outcome.REFUSED,
        "enable_torch_compile enable_nvidia_megakernel enable_amd_monokernel enable_lean_attention "
        "enable_mis",
        settings="enable_torch_compile_debug_mode torch_compile_max_bs",
        shown_by=(REFUSALS,),
    ),
    Family(
        "CUDA graphs",
        Outcome.INERT,
        "cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill "
        "disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph "
        "disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc",
        "a CPU has none; on an NPU they are switched off with a line in the log",
        settings="cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill "
        "cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context debug_cuda_graph",
        given=(
            "--cuda-graph-max-bs-decode=4",
            "--cuda-graph-max-bs-prefill=64",
            "--cuda-graph-max-seq-len-prefill=100",
            "--disable-prefill-cuda-graph",
            "--disable-decode-cuda-graph",
            "--disable-cuda-graph",
            "--disable-cuda-graph-padding",
            "--enable-profile-cuda-graph",
            "--enable-cudagraph-gc",
        ),
        shown_by=(INERT,),
    ),
    Family(
        "Kernels of GPUs and of other models",
        Outcome.INERT,
        "fp8_gemm_runner_backend fp4_gemm_runner_backend dsa_prefill_backend dsa_decode_backend "
        "dsa_topk_backend dsa_paged_mqa_logits_backend dsa_triton_union dsv4_prefill_backend "
        "dsv4_attn_backend disable_flashinfer_autotune flashinfer_autotune_skip_ops "
        "triton_attention_reduce_in_fp32 triton_attention_num_kv_splits "
        "triton_attention_split_tile_size flashinfer_mla_disable_ragged "
        "enable_precise_embedding_interpolation enable_dsa_fused_indexer flashinfer_mxfp4_moe_precision "
        "disable_shared_experts_fusion disable_flashinfer_cutlass_moe_fp4_allgather "
        "disable_chunked_prefix_cache disable_hybrid_swa_memory swa_full_tokens_ratio swa_prefix_tails "
        "enable_fused_qk_norm_rope enable_tf32_matmul enable_fused_moe_sum_all_reduce c128_page_size",
        "nothing of a Kimi model on a CPU runs on them",
        settings="qsa_indexer_dtype enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay "
        "enable_deepseek_v4_fp4_indexer enable_scattered_sconv ple_offload_embedding "
        "ple_offload_backend ple_offload_dir _swa_full_tokens_ratio_explicitly_set",
        given=(
            "--fp8-gemm-backend=triton",
            "--fp4-gemm-backend=marlin",
            "--dsa-prefill-backend=flashmla_sparse",
            "--dsa-decode-backend=flashmla_sparse",
            "--dsa-topk-backend=torch",
            "--dsa-paged-mqa-logits-backend=aiter",
            "--dsa-triton-union=2",
            "--dsv4-prefill-backend=flashmla_sparse",
            "--dsv4-attn-backend=flashmla",
            "--disable-flashinfer-autotune",
            "--flashinfer-autotune-skip-ops=x",
            "--triton-attention-reduce-in-fp32",
            "--triton-attention-num-kv-splits=4",
            "--triton-attention-split-tile-size=64",
            "--flashinfer-mla-disable-ragged",
            "--enable-precise-embedding-interpolation",
            "--enable-dsa-fused-indexer",
            "--flashinfer-mxfp4-moe-precision=bf16",
            "--disable-shared-experts-fusion",
            "--disable-flashinfer-cutlass-moe-fp4-allgather",
            "--disable-chunked-prefix-cache",
            "--disable-hybrid-swa-memory",
            "--swa-full-tokens-ratio=0.5",
            "--swa-prefix-tails=4",
            "--enable-fused-qk-norm-rope",
            "--enable-fused-moe-sum-all-reduce",
            "--enable-tf32-matmul",
            "--c128-page-size=32",
        ),
        shown_by=(INERT,),
    ),
)
