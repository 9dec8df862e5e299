"""The tier's environment itself, and what the plugin does on SGLang's NPU platform.

Not proven here: that a real CANN runtime answers as the stand-in does.
"""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from sglang_k3 import registration
from sglang_k3.platforms.served import served_device


def test_torch_is_the_cpu_build_that_torch_npu_wants():
    assert torch.__version__ == "2.13.0+cpu" and metadata.version("torch_npu").startswith("2.13.0")


def test_scheduler_imports_and_the_platform_is_sglangs_own(emulator):
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.platforms import current_platform

    assert type(current_platform).__name__ == "NPUSRTPlatform" and served_device() == "npu"


def test_every_hook_of_the_npu_takes_and_none_of_the_cpu(emulator):
    from sglang.srt.plugins import load_plugins

    load_plugins()
    assert registration.failures() == []
    targets = {hook.target for hook in registration.hooks()}
    assert "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker" in targets
    assert not any(target.endswith(("enable_batch_invariant_mode", "get_last_loc")) for target in targets)


def test_other_models_keep_sglangs_backend(emulator):
    from types import SimpleNamespace

    from sglang_k3.attention_backends import ascend

    runner = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]))
    )
    assert ascend.create(lambda given: ("stock", given), runner) == ("stock", runner)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"enable_deterministic_inference": True}, "deterministic-inference is not to be had on an NPU"),
        ({"mamba_ssm_dtype": "bfloat16"}, "--mamba-ssm-dtype bfloat16"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(emulator, change, message):
    with pytest.raises(ValueError, match=message) as raised:
        _refuse(change, {})
    assert "eave it out" in str(raised.value)


def test_mxfp4_experts_are_refused_on_a3_by_name(emulator):
    with pytest.raises(
        ValueError, match="MXFP4, a format of the Ascend 950 series, and this is Ascend910_9391"
    ):
        _refuse({}, {"format": "mxfp4-pack-quantized"})


def test_row_budgets_are_refused(emulator, monkeypatch):
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    with pytest.raises(ValueError, match="SGLANG_RAGGED_VERIFY_MODE=compact"):
        _refuse({"speculative_algorithm": "DSPARK"}, {})


def test_anchored_records_are_refused(emulator, monkeypatch):
    monkeypatch.setenv("SGLANG_K3_RECORDS", "anchored")
    with pytest.raises(ValueError, match="SGLANG_K3_RECORDS=anchored"):
        _refuse({"speculative_algorithm": "DSPARK"}, {})


def _refuse(change: dict, quantization: dict) -> None:
    from types import SimpleNamespace

    from sglang_k3.platforms import npu

    view = {"enable_deterministic_inference": False, "mamba_ssm_dtype": None, "speculative_algorithm": None}
    config = SimpleNamespace(quantization_config=quantization)
    npu.refuse(SimpleNamespace(**(view | change)), SimpleNamespace(hf_text_config=config, hf_config=config))
