"""What this package does, and what holds around it."""

from __future__ import annotations

from tests.compatibility.rows import Feature, Surrounding

FEATURES = (
    Feature(
        "Kimi K3 text model, float32, against SGLang's own class",
        "1e-3",
        "1e-3 (model runner)",
        shown_by=("tests/models/test_against_sglang.py",),
    ),
    Feature(
        "Kimi Linear against transformers, float32",
        "1e-4",
        "1e-4; tokens by the margin rule",
        shown_by=(
            "tests/models/test_reference.py",
            "tests/server/test_against_transformers.py",
            "tests/server/test_fast_mode.py",
        ),
    ),
    Feature(
        "Kimi Linear in both config dialects",
        "yes",
        "yes",
        shown_by=("tests/models/test_config.py", "tests/server/test_fast_mode.py"),
    ),
    Feature(
        "Float32: the CPU server's tokens",
        "margin rule",
        "yes",
        "yes",
        shown_by=(
            "tests/server/test_fast_mode.py",
            "tests/npu/cases_serving.py::test_thirty_requests_give_the_cpu_servers_tokens",
        ),
    ),
    Feature(
        "bfloat16",
        "",
        "yes",
        "operators",
        shown_by=("tests/server/test_fast_mode.py", "tests/npu/cases_vendor.py"),
    ),
    Feature(
        "Exact mode, float32",
        "",
        "bitwise",
        "refused",
        shown_by=("tests/server/test_exact_mode.py", "tests/npu/cases_environment.py"),
    ),
    Feature(
        "MXFP4 routed experts, packed in memory",
        "yes",
        "yes",
        "as a 950; refused as an A3",
        shown_by=(
            "tests/models/test_reference.py",
            "tests/server/test_exact_mode.py",
            "tests/npu/cases_vendor.py",
            "tests/npu/cases_environment.py",
        ),
    ),
    Feature(
        "Strict loading: missing, unknown, misshapen tensors",
        "",
        "named",
        shown_by=("tests/models/test_weights.py", "tests/server/test_startup_errors.py"),
    ),
    Feature(
        "The published config: parameters, names, shards of eight ranks",
        "",
        "meta device",
        shown_by=("tests/models/test_real_size.py",),
    ),
    Feature("The published weights"),
    Feature("Vision", "", "refused per request", shown_by=("tests/server/test_requests.py",)),
    Feature(
        "Models that are not Kimi, on our platform",
        "",
        "yes",
        "SGLang's backend",
        shown_by=("tests/server/test_stock_model.py", "tests/npu/cases_environment.py"),
    ),
    Feature(
        "Chat completions: reasoning and tool calls, streamed at every byte",
        "",
        "yes",
        shown_by=("tests/server/test_chat.py",),
    ),
    Feature(
        "Prefix cache of KDA states: depth of hits, forks, edits, evictions, refused allocations",
        "",
        "bitwise in exact mode",
        "hits give the cold run's tokens",
        shown_by=(
            "tests/server/test_prefix_cache.py",
            "tests/prefix_cache/test_inside.py",
            "tests/npu/cases_decode.py::test_a_hit_gives_the_cold_runs_tokens",
        ),
    ),
    Feature(
        "State events and routing by them",
        "",
        "yes",
        shown_by=(
            "tests/prefix_cache/inside/cases_events.py",
            "tests/prefix_cache/test_events.py",
            "tests/prefix_cache/test_routing.py",
            "tests/prefix_cache/test_router_target.py",
            "tests/server/test_workers.py",
        ),
    ),
    Feature(
        "Speculation with a DSpark draft: the plain server's answers",
        "",
        "bitwise in exact mode",
        "same tokens",
        shown_by=(
            "tests/server/test_speculation.py",
            "tests/speculative/test_inside.py",
            "tests/npu/cases_serving.py",
        ),
    ),
    Feature(
        "`SGLANG_K3_RECORDS` plain, folded, ring, anchored",
        "",
        "all",
        "plain; anchored refused",
        shown_by=(
            "tests/speculative/test_inside.py",
            "tests/npu/cases_serving.py",
            "tests/npu/cases_environment.py",
        ),
    ),
    Feature(
        "`SGLANG_RAGGED_VERIFY_MODE` unset, static, compact; cap-accept is refused",
        "",
        "yes",
        "static; compact refused",
        shown_by=(
            "tests/server/test_speculation.py",
            "tests/speculative/inside/cases_budget.py",
            "tests/server/test_arguments.py::test_ways_to_verify_are_chosen_by_name",
            "tests/npu/cases_environment.py::test_row_budgets_are_refused",
        ),
    ),
    Feature(
        "NaN or Inf in a request's logits",
        "",
        "that request ends alone",
        shown_by=("tests/prefix_cache/inside/cases_broken.py",),
    ),
    Feature(
        "`/update_weights_from_disk` while requests run; weights that do not fit",
        "",
        "yes; the old ones stay",
        shown_by=("tests/speculative/inside/cases_weights.py",),
    ),
    Feature(
        "Host reads, streams and races of a step",
        "",
        "",
        "declared, in order",
        shown_by=("tests/npu/cases_decode.py", "tests/npu/cases_streams.py"),
    ),
    Feature(
        "Our Triton kernels for NPUs",
        "",
        "",
        "Triton's interpreter; compiled for 910B3 and 950 (verify)",
        shown_by=("tests/kernels/triton/test_interpreted.py", "tests/kernels/triton/test_compile.py"),
    ),
    Feature(
        "`SGLANG_K3_KERNELS=triton`: they serve",
        "",
        "refused",
        "the CPU server's tokens, in Triton's interpreter",
        shown_by=(
            "tests/server/test_arguments.py::test_ways_to_verify_are_chosen_by_name",
            "tests/npu/cases_triton.py",
            "tests/npu/cases_triton_decode.py",
        ),
    ),
)

SURROUNDINGS = (
    Surrounding(
        "Another SGLang version",
        "stops at start, named with the one to install",
        ("tests/server/test_startup_errors.py", "tests/test_doctor.py"),
    ),
    Surrounding(
        "A hook or registration that did not take, in any process",
        "stops at start, named",
        ("tests/server/test_startup_errors.py",),
    ),
    Surrounding(
        "`sglang-k3 doctor`",
        "sound; another SGLang version; a hook that did not take; an operator that computes something else, "
        "named; without SGLang, torch or a model",
        ("tests/test_doctor.py",),
    ),
    Surrounding(
        "`sglang-k3 plan`",
        "weights of a rank to the byte; pools within 2 percent of what a CPU server allocates with the "
        "printed flags; times of a step are an estimate beside published figures",
        (
            "tests/planning/test_bytes.py",
            "tests/planning/test_allocation.py",
            "tests/planning/test_roofline.py",
        ),
    ),
    Surrounding(
        "`sglang-k3 cache`",
        "a running server's hits, losses and slots",
        ("tests/server/test_prefix_cache.py::test_the_command_shows_the_same",),
    ),
    Surrounding(
        "`pip install` beside torch 2.13.0", "touches neither torch nor SGLang", ("tests/test_packaging.py",)
    ),
    Surrounding(
        "`requirements-npu.txt`",
        "suffices to import every server process; holds no torch",
        ("tests/test_packaging.py",),
    ),
    Surrounding(
        "An NPU present (emulated)",
        "our CPU platform steps aside, the plugin serves Kimi models on SGLang's",
        ("tests/npu/cases_environment.py",),
    ),
    Surrounding(
        "A GPU present", "not run: our CPU platform is written to step aside, and no such device was at hand"
    ),
)
