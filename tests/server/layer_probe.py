"""Runs SGLang's real model runner in this process and saves what each layer saw.

A server only shows logits; comparing bf16 layer by layer needs the hidden states, so a test runs
`python -m tests.server.layer_probe` as its own process (SGLang keeps one runner a process).
"""

from __future__ import annotations

import argparse
import json
from array import array
from pathlib import Path
from typing import Any

import torch


def run(model: str, flags: list[str], prompts: list[list[int]]) -> list[dict[str, Any]]:
    """For each prompt {"hidden": [L+1, T, D], "experts": {layer: [T, k]}, "logits": [T, V]}.

    hidden[l] is what layer l's attention norm reads; the last entry what the final norm reads.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.benchmark import one_batch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import PortArgs, prepare_server_args

    server_args = prepare_server_args(["--model-path", model, "--device", "cpu", *flags])
    server_args.resolve_once()
    ports = PortArgs.init_new(server_args)
    rank = one_batch.spawn_world_rank(server_args, tp_rank=0, pp_rank=0)
    one_batch.publish(server_args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=rank, gpu_id=0))
    one_batch._init_process_global_configs()
    bench: Any = one_batch.load_model(server_args, ports, 0, 0)[0]
    runner = bench.torch_runner
    network = runner.model.model

    seen: dict[str, Any] = {}

    def keep_input(index: int):
        def hook(module, inputs):
            seen["hidden"][index] = inputs[0].float().clone()

        return hook

    def keep_experts(index: int):
        def hook(module, inputs, outputs):
            seen["experts"][index] = outputs[1].clone()

        return hook

    def keep_output(module, inputs, output):
        head = runner.model.lm_head
        logits = head.quant_method.apply(head, output)[:, : runner.model.text.vocab_size]
        seen["logits"] = logits.float().clone()

    for index, layer in enumerate(network.layers):
        layer.input_layernorm.register_forward_pre_hook(keep_input(index))
        if hasattr(layer.mlp, "router"):
            layer.mlp.router.register_forward_hook(keep_experts(index))
    network.norm.register_forward_pre_hook(keep_input(len(network.layers)))
    network.norm.register_forward_hook(keep_output)

    results = []
    for number, prompt in enumerate(prompts):
        seen["hidden"] = [torch.empty(0)] * (len(network.layers) + 1)
        seen["experts"] = {}
        request = Req(
            rid=str(number),
            origin_input_text="",
            origin_input_ids=array("q", prompt),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        )
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.extend_end = len(prompt)
        with torch.no_grad():
            one_batch.extend([request], runner)
        results.append({**seen, "hidden": torch.stack(seen["hidden"])})
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path, help="JSON file with a list of lists of token ids")
    parser.add_argument("output", type=Path)
    known, flags = parser.parse_known_args()
    torch.save(run(known.model, flags, json.loads(known.prompts.read_text())), known.output)


if __name__ == "__main__":
    main()
