"""SGLang's own model runner around a checkpoint, in this process and without a server.

What a server only shows as text (hidden states, the time of a step) can be read here. SGLang keeps one
configuration a process, so a process starts one runner.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch


def start(model: str, flags: list[str]) -> Any:
    """The runner that SGLang's one-batch benchmark uses; its `torch_runner` is the ModelRunner.

    flags: launch_server's, without model and device. Plugins are loaded as a scheduler process does.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, prepare_server_args

    server_args = prepare_server_args(["--model-path", model, "--device", "cpu", *flags])
    server_args.resolve_once()
    ports = PortArgs.init_new(server_args)
    rank = one_batch.spawn_world_rank(server_args, tp_rank=0, pp_rank=0)
    one_batch.publish(server_args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=rank, gpu_id=0))
    one_batch._init_process_global_configs()
    return one_batch.load_model(server_args, ports, 0, 0)[0]


def request(number: int, prompt: list[int], new_tokens: int = 1) -> Any:
    """A greedy request, ready for `extend`."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    made = Req(
        rid=str(number),
        origin_input_text="",
        origin_input_ids=array("q", prompt),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=new_tokens),
    )
    made.full_untruncated_fill_ids = made.origin_input_ids
    made.logprob_start_len = -1
    made.extend_end = len(prompt)
    return made


@torch.no_grad()
def extend(runner: Any, requests: list[Any]) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Prefill the requests as one batch: (next token ids [N], logits [N, vocabulary], the batch)."""
    from sglang.benchmark import one_batch

    return one_batch.extend(requests, runner.torch_runner)


@torch.no_grad()
def decode(runner: Any, tokens: torch.Tensor, batch: Any) -> torch.Tensor:
    """One decode step of the batch; the next token ids [N]."""
    from sglang.benchmark import one_batch

    return one_batch.decode(tokens, batch, runner.torch_runner)[0]
