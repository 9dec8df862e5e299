"""Which checkpoints our model classes answer for.

Standard library alone: the hooks on SGLang ask before anything else is imported.
"""

from __future__ import annotations

from typing import Any

# Architecture names stay upstream's, so SGLang's own tables about them (MLA cache, radix cache, chat
# encoding, parsers) keep working; our classes answer for them.
ARCHITECTURES = {
    "KimiK3ForConditionalGeneration": "sglang_k3.models.kimi_k3",
    "KimiK3LinearForCausalLM": "sglang_k3.models.kimi_k3",
    "KimiLinearForCausalLM": "sglang_k3.models.kimi_k3",
}
DRAFT_ARCHITECTURES = {"DSparkDraftModel": "sglang_k3.models.dspark_draft"}
TEXT_ONLY_K3 = "KimiK3LinearForCausalLM"


def architecture_of(model_config: Any) -> str:
    """Of SGLang's model config; "" for a checkpoint that names none."""
    return (model_config.hf_config.architectures or [""])[0]


def is_kimi(model_config: Any) -> bool:
    """Whether our classes answer for the model of SGLang's model config."""
    return architecture_of(model_config) in ARCHITECTURES
