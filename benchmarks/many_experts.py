"""The trained tiny K3 with its experts multiplied and enlarged, until they no longer fit a cache.

A random model writes noise, which no draft foretells; training one of this size takes days on a CPU. So each
trained expert is copied until there are 128. Copies stand in four groups of which the router keeps one, in
which every expert is there twice: eight chosen experts are the four that the trained router chose, twice, at
half the weight each. Each group's router has noise of its own, so that tokens that agree on experts differ in
copies. The latent space and the hidden rows are enlarged by what is multiplied by zero behind them. The text
stays the trained model's but for the noise, the draft stays useful, and a step loads what its rows touch.

    python -m benchmarks.many_experts DIRECTORY [--width 512]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.machine import l3_bytes
from benchmarks.stages.models import TINY
from sglang_k3.models.config import MXFP4_GROUP, K3Config

EXPERTS, TOP_K, GROUPS = 128, 8, 4
ROUTER_NOISE = 0.02
"""Of a router row's RMS."""

LATENT = 1024
"""Sixteen times the tiny model's: its norm's weights change by a power of two, which costs no bit."""

_ONE = 127
"""The scale byte of 2^0."""

_WIDTH_STEP = 128
_CACHE_SHARE = 1.25


def widen(source: Path, target: Path, width: int, *, noise: float = ROUTER_NOISE, seed: int = 0) -> int:
    """Write to `target` the checkpoint `source` with 128 experts of `width` hidden rows.

    Returns the bytes of all experts. Raises ValueError where the source's cannot be multiplied so.
    """
    raw = json.loads((source / "config.json").read_text())
    text = raw["text_config"]
    _check(text, width)
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, target / file.name)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        section, _, part = name.partition(".block_sparse_moe.")
        if part.startswith("experts."):
            _, expert, matrix = part.split(".", 2)
            large = _enlarged(matrix, tensor, width)
            for copy in range(EXPERTS // text["num_experts"]):
                number = int(expert) + copy * text["num_experts"]
                tensors[f"{section}.block_sparse_moe.experts.{number}.{matrix}"] = large.clone()
        elif part == "gate.weight":
            tensors[name] = _router(tensor, noise, generator)
        elif part == "gate.e_score_correction_bias":
            tensors[name] = tensor.repeat(EXPERTS // len(tensor))
        else:
            tensors[name] = _enlarged(part, tensor, width) if part else tensor
    text |= {
        "num_experts": EXPERTS,
        "num_experts_per_token": TOP_K,
        "num_expert_group": GROUPS,
        "topk_group": 1,
        "moe_intermediate_size": width,
        "routed_expert_hidden_size": LATENT,
    }
    (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return expert_bytes(tensors)


def expert_bytes(tensors: dict[str, Tensor]) -> int:
    """Of all routed experts of a checkpoint, as stored."""
    return sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." in name)


def _check(text: dict, width: int) -> None:
    copies = EXPERTS / GROUPS / text["num_experts"]
    if copies != TOP_K / text["num_experts_per_token"] or text["num_shared_experts"] != 1:
        raise ValueError(
            f"{text['num_experts']} experts, {text['num_experts_per_token']} chosen, cannot become {EXPERTS} "
            f"with {TOP_K} chosen in one of {GROUPS} groups: start from examples/tiny-k3"
        )
    if width % MXFP4_GROUP or width < text["moe_intermediate_size"]:
        raise ValueError(
            f"width {width}: pass a multiple of {MXFP4_GROUP} and at least {text['moe_intermediate_size']}"
        )


def _router(weight: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """[E, D] -> [128, D]: a group holds every row twice, with the group's noise."""
    each = EXPERTS // GROUPS // len(weight)
    rms = weight.float().square().mean(1, keepdim=True).sqrt()
    groups = [
        (weight.float() + noise * rms * torch.randn(weight.shape, generator=generator)).to(weight.dtype)
        for _ in range(GROUPS)
    ]
    return torch.cat([group.repeat(each, 1) for group in groups])


def _enlarged(part: str, tensor: Tensor, width: int) -> Tensor:
    """A matrix of the mixture with LATENT and `width` for its old sizes. Rows are repeated where zeros meet
    their outputs later; columns are filled with zeros where they meet repeated ones."""
    packing = MXFP4_GROUP if part.endswith("weight_scale") else 2 if part.endswith("weight_packed") else 1
    fill = _ONE if part.endswith("weight_scale") else 0
    match part.rsplit(".", 1)[0]:
        case "w1" | "w3":
            return _filled(_repeated(tensor, width), LATENT // packing, fill)
        case "w2":
            return _filled(_filled(tensor, width // packing, fill).T, LATENT, fill).T.contiguous()
        case "routed_expert_down_proj":
            return _repeated(tensor, LATENT)
        case "routed_expert_norm":
            # The mean is over more numbers, the same sum.
            return _repeated(tensor, LATENT) * (len(tensor) / LATENT) ** 0.5
        case "routed_expert_up_proj":
            return _filled(tensor, LATENT, fill)
        case "shared_experts.gate_proj" | "shared_experts.up_proj":
            return _repeated(tensor, width)
        case "shared_experts.down_proj":
            return _filled(tensor, width, fill)
    raise ValueError(f"the mixture has a tensor {part}, which cannot be enlarged")


def _repeated(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor] * -(-rows // len(tensor)))[:rows].contiguous()


def _filled(tensor: Tensor, columns: int, value: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, columns - tensor.shape[1]), value=value)


def width_beyond(cache: int | None) -> int:
    """The hidden rows that make the tiny model's experts larger than a cache of so many bytes."""
    config = K3Config.from_hf(json.loads((TINY / "config.json").read_text()))
    row = 3 * LATENT * (1 / 2 + 1 / MXFP4_GROUP) * EXPERTS * len(config.moe_layers)
    return _WIDTH_STEP * max(1, math.ceil(_CACHE_SHARE * (cache or 0) / row / _WIDTH_STEP))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--width", type=int, default=width_beyond(l3_bytes()), help="hidden rows of an expert"
    )
    arguments = parser.parse_args()
    try:
        size = widen(TINY, arguments.directory, arguments.width)
    except ValueError as error:
        sys.exit(str(error))
    print(f"{arguments.directory}: {size / 1e6:.0f} MB of experts, {(l3_bytes() or 0) / 1e6:.0f} MB of cache")


if __name__ == "__main__":
    main()
