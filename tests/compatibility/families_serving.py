"""Flags about clients, requests, answers and what a server tells of itself."""

from __future__ import annotations

from tests.compatibility.families_model import INERT, REFUSALS
from tests.compatibility.families_running import FLAGS
from tests.compatibility.rows import Family, Outcome

FAMILIES = (
    Family(
        "HTTP interface",
        Outcome.WORKS,
        "host port served_model_name stream_interval incremental_streaming_output "
        "stream_response_default_include_usage",
        "`/generate`, `/v1/completions`, `/v1/chat/completions`, whole and streamed",
        shown_by=(
            "tests/server/test_clients.py",
            f"{FLAGS}::test_the_model_has_the_name_it_was_given",
            f"{FLAGS}::test_a_stream_comes_in_pieces_of_the_interval",
        ),
    ),
    Family(
        "Keys",
        Outcome.WORKS,
        "api_key admin_api_key",
        shown_by=(f"{FLAGS}::test_a_request_without_the_key_is_turned_away",),
    ),
    Family(
        "TLS, HTTP/2, gRPC, proxies",
        Outcome.UNTRIED,
        "ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh enable_http2 "
        "http2_max_concurrent_streams http2_initial_connection_window_size smg_grpc_mode grpc_mode "
        "grpc_port grpc_response_timeout_secs grpc_worker_threads sidecar sidecar_args "
        "smg_http_sidecar_port enable_http_worker_reuseport fastapi_root_path",
        "SGLang's own; this package takes no part",
    ),
    Family(
        "Chat: reasoning, tools, templates",
        Outcome.WORKS,
        "reasoning_parser tool_call_parser",
        "kimi_k3 for both, streamed at every byte",
        settings="chat_template trust_request_chat_template hf_chat_template_name completion_template "
        "default_chat_template_kwargs enable_strict_thinking tool_server",
        shown_by=("tests/server/test_chat.py",),
    ),
    Family(
        "Stored responses",
        Outcome.WORKS,
        "enable_response_store",
        "`/v1/responses`",
        settings="file_storage_path",
        shown_by=(f"{FLAGS}::test_a_stored_response_is_found_again",),
    ),
    Family(
        "Ways to tokenize and to hand results on",
        Outcome.INERT,
        "tokenizer_mode enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size "
        "dynamic_batch_tokenizer_batch_timeout disable_tokenizer_batch_decode batch_notify_size",
        given=(
            "--tokenizer-mode=slow",
            "--enable-dynamic-batch-tokenizer",
            "--dynamic-batch-tokenizer-batch-size=4",
            "--dynamic-batch-tokenizer-batch-timeout=0.001",
            "--disable-tokenizer-batch-decode",
            "--batch-notify-size=4",
        ),
        shown_by=(INERT,),
    ),
    Family(
        "Tokenizer processes",
        Outcome.UNTRIED,
        "tokenizer_worker_num detokenizer_worker_num",
        "two did not come up on two busy cores: uvicorn ends a worker that imports SGLang for longer than "
        "it waits",
    ),
    Family(
        "Other tokenizers",
        Outcome.UNTRIED,
        "tokenizer_path tokenizer_backend enable_tokenizer_batch_encode skip_tokenizer_init",
        "SGLang's own; this package takes no part",
    ),
    Family(
        "Sampling defaults",
        Outcome.WORKS,
        "sampling_defaults preferred_sampling_params random_seed",
        "settings of a request beside them",
        shown_by=("tests/server/test_speculation.py",),
    ),
    Family(
        "Sampling kernels",
        Outcome.WORKS,
        "sampling_backend",
        "pytorch; any other is refused (ascend on an NPU)",
        settings="sampling_mask_max_tokens mlx_enable_sampling",
        shown_by=("tests/server/test_speculation.py",),
    ),
    Family(
        "Grammars: JSON schema, regex, EBNF, structural tags",
        Outcome.WORKS,
        "grammar_backend constrained_json_disable_any_whitespace",
        "xgrammar (the default), also beside a draft; outlines",
        settings="constrained_json_whitespace_pattern constrained_json_max_whitespace_cnt "
        "disable_outlines_disk_cache",
        shown_by=(
            f"{FLAGS}::test_an_answer_is_bound_by_its_grammar",
            f"{FLAGS}::test_another_grammar_backend_binds_an_answer_too",
            "tests/server/test_speculation.py",
        ),
    ),
    Family(
        "Custom logit processors",
        Outcome.WORKS,
        "enable_custom_logit_processor",
        shown_by=("tests/server/test_chat.py",),
    ),
    Family(
        "Hidden states",
        Outcome.WORKS,
        "enable_return_hidden_states return_hidden_states_mode",
        "what the head reads; refused beside a draft",
        shown_by=(
            f"{FLAGS}::test_hidden_states_are_what_the_head_reads",
            "tests/server/test_arguments.py::test_each_flag_that_cannot_work_is_refused_by_name",
        ),
    ),
    Family(
        "Other inner values",
        Outcome.REFUSED,
        "enable_return_aux_hidden_states enable_return_routed_experts enable_return_indexer_topk "
        "enable_fp32_lm_head",
        settings="aux_hidden_state_capture return_aux_hidden_state_layer_ids",
        shown_by=(REFUSALS,),
    ),
    Family(
        "Embeddings, rewards, classification",
        Outcome.REFUSED,
        "is_embedding",
        "`/v1/score` of a generating server works",
        settings="prefill_only_disable_kv_cache",
        shown_by=(REFUSALS, f"{FLAGS}::test_scores_are_the_probabilities_of_the_labels"),
    ),
    Family(
        "Watermarks",
        Outcome.REFUSED,
        "enable_watermark",
        settings="watermark_config watermark_key watermark_key_b watermark_context_window "
        "watermark_mixing_probability watermark_max_probability watermark_default_enabled "
        "watermark_enforce_all",
        shown_by=(REFUSALS,),
    ),
    Family(
        "What an answer tells",
        Outcome.WORKS,
        "enable_cache_report return_input_ids return_output_ids",
        "cached tokens and ids of an answer",
        shown_by=("tests/server/test_clients.py", f"{FLAGS}::test_a_chat_tells_its_ids"),
    ),
    Family(
        "Cutting prompts over the context",
        Outcome.UNTRIED,
        "allow_auto_truncate",
        "without it they are refused with both numbers",
    ),
    Family(
        "New weights while serving",
        Outcome.WORKS,
        "weight_version",
        "`/update_weights_from_disk`; weights that do not fit leave the old ones",
        shown_by=(
            f"{FLAGS}::test_new_weights_are_served_and_the_old_ones_again",
            "tests/speculative/inside/cases_weights.py",
        ),
    ),
    Family(
        "Metrics",
        Outcome.WORKS,
        "enable_metrics extra_metric_labels bucket_time_to_first_token",
        "SGLang's and `sglang_k3:`",
        settings="enable_mfu_metrics enable_metrics_for_all_schedulers "
        "tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels "
        "bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets "
        "generation_tokens_buckets",
        shown_by=(
            "tests/server/test_operations.py",
            "tests/server/test_prefix_cache.py",
            f"{FLAGS}::test_metrics_have_the_labels_and_buckets_asked_for",
        ),
    ),
    Family(
        "State and KV events",
        Outcome.WORKS,
        "kv_events_config",
        "publishers states, joint (both with the k3 cache, refused for other models and caches), zmq",
        settings="load_publish_endpoint",
        shown_by=(
            "tests/prefix_cache/inside/cases_events.py",
            "tests/prefix_cache/test_events.py",
            "tests/server/test_workers.py",
            "tests/server/test_arguments.py::test_each_flag_that_cannot_work_is_refused_by_name",
        ),
    ),
    Family(
        "Requests and figures in files",
        Outcome.WORKS,
        "log_requests log_requests_format log_requests_target export_metrics_to_file "
        "export_metrics_to_file_dir",
        settings="log_requests_level",
        shown_by=(f"{FLAGS}::test_requests_are_logged_and_measured_in_files",),
    ),
    Family(
        "Crash dumps",
        Outcome.WORKS,
        "crash_dump_folder",
        "requests of the last minutes, when a scheduler dies",
        shown_by=(f"{FLAGS}::test_requests_are_kept_when_the_scheduler_dies",),
    ),
    Family(
        "Lines of the log",
        Outcome.INERT,
        "log_level log_level_http uvicorn_access_log_exclude_prefixes show_time_cost "
        "gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging "
        "load_snapshot_publish_interval",
        given=(
            "--log-level=warning",
            "--log-level-http=error",
            "--uvicorn-access-log-exclude-prefixes=/health",
            "--show-time-cost",
            "--gc-warning-threshold-secs=5",
            "--decode-log-interval=7",
            "--enable-request-time-stats-logging",
            "--load-snapshot-publish-interval=3",
        ),
        shown_by=(INERT,),
    ),
    Family(
        "Traces",
        Outcome.UNTRIED,
        "enable_trace trace_modules otlp_traces_endpoint otlp_service_name enable_forward_pass_metrics "
        "forward_pass_metrics_worker_id forward_pass_metrics_ipc_name",
        "they need packages and a collector that were not at hand",
    ),
    Family(
        "Debugging SGLang",
        Outcome.UNTRIED,
        "kv_canary kv_canary_real_data kv_canary_sweep_interval debug_tensor_dump_output_folder "
        "debug_tensor_dump_layers debug_tensor_dump_input_file forward_hooks msprobe_dump_config "
        "warmups enable_layerwise_nvtx_marker",
    ),
    Family(
        "From Python alone",
        Outcome.UNTRIED,
        "custom_sigquit_handler stat_loggers",
        "they have no option on the command line",
    ),
)
