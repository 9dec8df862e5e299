"""Builds the served model and the draft at their real sizes for one rank of several, on the meta device.

Prints, as JSON, what each layout holds: bytes of the parameters, of what is derived from them, of the draft.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from tests.models.real_size_probe import published, under

LAYOUTS = ((1, 1), (8, 1), (16, 16), (16, 4))


def tensors(module: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Every tensor that a module or one of its modules has as an attribute, in a list or not."""
    found: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for held in (*part.__dict__.values(), *part._parameters.values(), *part._buffers.values()):
            for value in held if isinstance(held, list) else (held,):
                if isinstance(value, torch.Tensor):
                    found[id(value)] = value
    return found


def main() -> None:
    hf_config = published()
    import transformers
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    from sglang_k3.models.config import K3Config
    from sglang_k3.models.dspark_draft import DSparkDraftModel
    from sglang_k3.models.kimi_k3 import K3TextModel
    from sglang_k3.models.layers import K3LinearConfig
    from sglang_k3.models.presets import real_draft_config

    config, linears = K3Config.from_hf(hf_config), K3LinearConfig()
    held: dict[str, Any] = {}
    # Tables of angles without YaRN, which the meta device can't compute, have the same size.
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    config_class: Any = transformers.PretrainedConfig
    draft_config = config_class(**real_draft_config() | plain)
    for tp, ep in LAYOUTS:
        with under(tp, tp - 1, ep), torch.device("meta"):
            model = torch.nn.Module()
            model.text = K3TextModel(config, linears, "model")
            model.text.prepare()
            model.head = ParallelLMHead(config.vocab_size, config.hidden_size, quant_config=linears)
            draft = DSparkDraftModel(draft_config)
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        held[f"{tp}x{ep}"] = {
            "parameters": parameters,
            "derived": sum(tensor.nbytes for tensor in tensors(model).values()) - parameters,
            "draft": sum(tensor.nbytes for tensor in tensors(draft).values()),
        }
    json.dump(held, sys.stdout)


if __name__ == "__main__":
    main()
