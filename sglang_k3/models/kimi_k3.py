"""Kimi K3's text model, and Kimi Linear by the same classes.

Read top-down: layer, model, causal LM. Class names are the architecture names that checkpoints carry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_k3.broken_requests import guard
from sglang_k3.models.attention_residual import BankedStream, Kernels, PlainStream, ResidualReader
from sglang_k3.models.config import K3Config
from sglang_k3.models.gated_mla import GatedMLA
from sglang_k3.models.kda_attention import KDAAttention
from sglang_k3.models.layers import K3LinearConfig, RMSNorm, Weight
from sglang_k3.models.runtime import activation_dtype
from sglang_k3.models.weights import load
from sglang_k3.moe.latent_moe import DenseMLP, LatentMoE


@dataclass(frozen=True)
class Taps:
    """What a draft model sees of the target: the residual stream after some layers.

    layers: in the order the draft concatenates them. mixture: the stream as the next layer's attention reads
    it (through the residual mix, before its norm); else the running sum alone. With a plain residual stream
    both are the same.
    """

    layers: tuple[int, ...]
    mixture: bool = True

    @staticmethod
    def of(layers: Sequence[int], count: int, mixture: bool = True) -> Taps:
        """Raises ValueError for layers that the target does not have."""
        wrong = [layer for layer in layers if not 0 <= layer < count]
        if wrong or not layers or len(set(layers)) != len(layers):
            raise ValueError(
                f"the draft taps layers {list(layers)}, but the target has layers 0..{count - 1}, each once: "
                "pass a draft that was trained for this target"
            )
        return Taps(tuple(layers), mixture)

    def take(
        self,
        tapped: dict[int, torch.Tensor],
        layer: int,
        mixed: torch.Tensor,
        stream: BankedStream | PlainStream,
    ) -> None:
        """After `layer`, one of `layers`: mixed [T, D] is what the next reader sees of the stream."""
        if self.mixture:
            tapped[layer] = mixed
        else:
            assert stream.partial is not None, (
                "the running sum is empty between a block's end and its first add"
            )
            tapped[layer] = stream.partial


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each between a read of the residual stream and an add to it."""

    def __init__(self, config: K3Config, layer: int, quant_config, prefix: str) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        attention = KDAAttention if config.is_kda(layer) else GatedMLA
        self.self_attn = attention(config, layer, quant_config, f"{prefix}.self_attn")
        self.mlp = (
            LatentMoE(config, quant_config, f"{prefix}.mlp")
            if config.is_moe(layer)
            else DenseMLP(config, config.intermediate_size, quant_config, f"{prefix}.mlp")
        )
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.starts_block = config.starts_block(layer)
        self.attention_reader: ResidualReader | None = None
        self.mlp_reader: ResidualReader | None = None
        if config.residual_block_size is not None:
            self.self_attention_res_norm = Weight(hidden)
            self.self_attention_res_proj = Weight(1, hidden)
            self.mlp_res_norm = Weight(hidden)
            self.mlp_res_proj = Weight(1, hidden)
            self.attention_reader = ResidualReader(hidden)
            self.mlp_reader = ResidualReader(hidden)

    def prepare(self) -> None:
        """After loading: derive what the forward needs from the checkpoint's tensors."""
        if self.attention_reader is not None and self.mlp_reader is not None:
            self.attention_reader.fold(
                self.self_attention_res_norm.weight, self.self_attention_res_proj.weight
            )
            self.mlp_reader.fold(self.mlp_res_norm.weight, self.mlp_res_proj.weight)
        self.self_attn.prepare()
        if isinstance(self.mlp, LatentMoE):
            self.mlp.router.prepare()

    def forward(self, x: torch.Tensor, stream: BankedStream | PlainStream, forward_batch) -> None:
        """x [T, D]: the stream as the attention sees it, normed by `input_layernorm`."""
        if self.starts_block:
            stream.close_block()
        stream.add(self.self_attn(x, forward_batch))
        stream.add(self.mlp(stream.read_normed(self.mlp_reader, self.post_attention_layernorm)))


class K3TextModel(nn.Module):
    """Embedding, layers, final mix and norm."""

    def __init__(self, config: K3Config, quant_config, prefix: str) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, quant_config, f"{prefix}.layers.{layer}")
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.activation_dtype = activation_dtype()
        self.output_reader: ResidualReader | None = None
        if config.residual_block_size is not None:
            self.output_attn_res_norm = Weight(config.hidden_size)
            self.output_attn_res_proj = Weight(1, config.hidden_size)
            self.output_reader = ResidualReader(config.hidden_size)
            self.residual_kernels = Kernels.chosen(config.rms_norm_eps)
        self.reader_weights: list[torch.Tensor] = []
        self.taps: Taps | None = None

    def prepare(self) -> None:
        """After loading. Groups the residual readers by the number of bank rows they see."""
        layers = cast(Iterable[DecoderLayer], self.layers)
        for layer in layers:
            layer.prepare()
        if self.output_reader is None:
            return
        self.output_reader.fold(self.output_attn_res_norm.weight, self.output_attn_res_proj.weight)
        config = self.config
        readers = [(config.bank_rows(config.num_layers), self.output_reader)]
        for index, layer in enumerate(layers):
            rows = config.bank_rows(index)
            assert layer.attention_reader is not None and layer.mlp_reader is not None
            readers.append((rows, layer.attention_reader))
            readers.append((rows + layer.starts_block, layer.mlp_reader))
        self.reader_weights = []
        for rows in range(len(config.block_starts) + 1):
            group = [reader for seen, reader in readers if seen == rows]
            for position, reader in enumerate(group):
                reader.index = position
            self.reader_weights.append(torch.stack([reader.key_weight for reader in group]))

    def forward(self, hidden: torch.Tensor, forward_batch) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """hidden [T, D] (embedded tokens) -> [T, D] for lm_head, and what a draft model taps ([T, D]
        each)."""
        hidden = hidden.to(self.activation_dtype)
        stream: BankedStream | PlainStream
        if self.output_reader is None:
            stream = PlainStream(hidden)
        else:
            blocks = len(self.config.block_starts)
            stream = BankedStream(hidden, blocks, self.reader_weights, self.residual_kernels)
        tapped: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(cast(Iterable[DecoderLayer], self.layers)):
            x = self._read(stream, layer.attention_reader, layer.input_layernorm, index - 1, tapped)
            layer(x, stream, forward_batch)
        x = self._read(stream, self.output_reader, self.norm, len(self.layers) - 1, tapped)
        return x, None if self.taps is None else [tapped[layer] for layer in self.taps.layers]

    def _read(
        self,
        stream: BankedStream | PlainStream,
        reader: ResidualReader | None,
        norm: RMSNorm,
        layer: int,
        tapped: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """What follows `layer` sees of the stream, normed [T, D]; a draft model takes it before its norm."""
        if self.taps is None or layer not in self.taps.layers:
            return stream.read_normed(reader, norm)
        mixed = stream.read(reader)
        self.taps.take(tapped, layer, mixed, stream)
        return norm(mixed)


class KimiK3LinearForCausalLM(nn.Module):
    """The text model with its head, as SGLang's model runner drives it."""

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__()
        # The whole config, so that messages about the checkpoint use its own tensor names.
        self.text = K3Config.from_hf(config)
        config = getattr(config, "text_config", config)
        self.config = config
        # Packed experts are recognised by the config; linear layers always run on our kernels.
        linears = K3LinearConfig()
        self.model = K3TextModel(self.text, linears, "model")
        self.lm_head = ParallelLMHead(
            self.text.vocab_size, self.text.hidden_size, quant_config=linears, prefix="lm_head"
        )
        self.logits_processor = LogitsProcessor(config)
        self.start_layer, self.end_layer = 0, self.text.num_layers

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    @torch.no_grad()
    def forward(self, input_ids, positions, forward_batch, input_embeds=None, **kwargs):
        hidden = self.model.embed_tokens(input_ids) if input_embeds is None else input_embeds
        hidden, tapped = self.model(hidden, forward_batch)
        return guard(self.logits_processor(input_ids, hidden, self.lm_head, forward_batch, tapped))

    def set_dspark_layers_to_capture(self, layer_ids: list[int]) -> None:
        """SGLang calls this with a draft's target_layer_ids; the worker chooses the stream afterwards."""
        self.model.taps = Taps.of(layer_ids, self.text.num_layers)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Strict: raises CheckpointError naming each tensor that is missing, unknown or misshapen."""
        parallel = get_parallel()
        load(self, self.text, weights, parallel.tp_rank, parallel.tp_size)
        self.model.prepare()


class KimiLinearForCausalLM(KimiK3LinearForCausalLM):
    """Kimi Linear: plain residual stream and experts at the hidden size, by the same classes."""


class KimiK3ForConditionalGeneration(KimiK3LinearForCausalLM):
    """The published checkpoint's architecture, text part only (language_model_only)."""
