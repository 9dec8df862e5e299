"""Runs SGLang's real model runner in this process and saves what each layer saw.

A server only shows logits; comparing bf16 layer by layer needs the hidden states, so a test runs
`python -m tests.server.layer_probe` as its own process (SGLang keeps one runner a process).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from sglang_k3.testing import runner


def run(model: str, flags: list[str], prompts: list[list[int]]) -> list[dict[str, Any]]:
    """For each prompt {"hidden": [L+1, T, D], "experts": {layer: [T, k]}, "logits": [T, V]}.

    hidden[l] is what layer l's attention norm reads; the last entry what the final norm reads.
    """
    bench = runner.start(model, flags)
    inner = bench.torch_runner
    network = inner.model.model

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
        head = inner.model.lm_head
        logits = head.quant_method.apply(head, output)[:, : inner.model.text.vocab_size]
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
        runner.extend(bench, [runner.request(number, prompt)])
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
