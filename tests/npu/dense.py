"""The example checkpoint with its MXFP4 experts unpacked, for chips that have no MX formats.

python -m tests.npu.dense SOURCE TARGET
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sglang_k3.kernels.mx.reference import dequantize_mxfp4


def unpack(source: Path, target: Path) -> None:
    """Write the checkpoint at `source` to `target`; every value stays what it was."""
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config.get("text_config", config).pop("quantization_config")
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, target)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        scale = tensors.pop(name.replace("_packed", "_scale"))
        tensors[name.removesuffix("_packed")] = dequantize_mxfp4(tensors.pop(name), scale, torch.bfloat16)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
