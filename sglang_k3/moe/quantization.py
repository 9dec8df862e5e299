"""How SGLang's loader learns that a checkpoint's experts are packed MXFP4.

SGLang's compressed-tensors config refuses float32 and wants a GPU kernel for the experts. Ours only says
that the format is understood; the model reads the packed tensors itself.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

from sglang_k3.models.layers import K3LinearConfig

MXFP4_FORMAT = "mxfp4-pack-quantized"


class CompressedTensorsOrMxfp4(CompressedTensorsConfig):
    """SGLang's config for every compressed-tensors checkpoint but K3's."""

    @classmethod
    def from_config(cls, config: dict[str, Any]):
        if config.get("format") == MXFP4_FORMAT:
            return K3LinearConfig()
        return CompressedTensorsConfig.from_config(config)
