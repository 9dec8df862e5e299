"""Builds the served model at Kimi K3's real size on the meta device and prints what came out, as JSON.

A process of its own, because SGLang's configuration is published once a process.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch


def published() -> Any:
    """SGLang's config object of Kimi K3, with this process configured to build its model."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.benchmark import one_batch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import prepare_server_args

    from sglang_k3.models.presets import real_k3_config

    with tempfile.TemporaryDirectory() as directory:
        values = real_k3_config() | {"language_model_only": True}
        (Path(directory) / "config.json").write_text(json.dumps(values))
        server_args = prepare_server_args(
            ["--model-path", directory, "--device", "cpu", "--skip-tokenizer-init"]
        )
        server_args.resolve_once()
        rank = one_batch.spawn_world_rank(server_args, tp_rank=0, pp_rank=0)
        ranks = one_batch.SpawnRanks(world_rank=rank, gpu_id=0)
        one_batch.publish(server_args, role="scheduler", ranks=ranks)
        hf_config = ModelConfig.from_server_args(server_args).hf_config
    torch.set_default_dtype(torch.bfloat16)
    return hf_config


def under(size: int, index: int, ep: int = 1):
    """A context in which a model is built for rank `index` of `size`, whose experts are in `ep` ranges."""
    from sglang.srt.runtime_context import get_parallel

    parallel: dict[str, Any] = {}
    for group in ("tp", "attn_tp"):
        parallel[f"{group}_size"], parallel[f"{group}_rank"] = size, index
    parallel["moe_tp_size"], parallel["moe_tp_rank"] = size // ep, index % (size // ep)
    return get_parallel().override(**parallel, moe_ep_size=ep, moe_ep_rank=index // (size // ep))


def main() -> None:
    hf_config = published()
    from sglang_k3.models.config import K3Config
    from sglang_k3.models.kimi_k3 import K3TextModel, KimiK3ForConditionalGeneration
    from sglang_k3.models.layers import K3LinearConfig
    from sglang_k3.models.names import expected_names
    from sglang_k3.models.weights import load

    config = K3Config.from_hf(hf_config)

    with under(1, 0), torch.device("meta"):
        model = KimiK3ForConditionalGeneration(hf_config)
        report = load(
            model,
            config,
            (
                (tensor.name, torch.empty(tensor.shape, dtype=tensor.dtype))
                for tensor in expected_names(config)
            ),
        )
    with under(8, 7), torch.device("meta"):
        shard: Any = K3TextModel(config, K3LinearConfig(), "model")
    with under(8, 7):
        # One layer's A_log with values, through the loader that the layer attached.
        vector = torch.empty(12)
        shard.layers[0].self_attn.A_log.weight_loader(
            torch.nn.Parameter(vector, requires_grad=False), torch.arange(128.0)
        )
    json.dump(
        {
            "parameters": {
                name: [list(p.shape), str(p.dtype).removeprefix("torch.")]
                for name, p in model.named_parameters()
            },
            "loaded": report.tensors,
            "vision_skipped": report.vision_skipped,
            "shard": {name: list(p.shape) for name, p in shard.named_parameters()},
            "a_log_of_rank_7": vector.tolist(),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
