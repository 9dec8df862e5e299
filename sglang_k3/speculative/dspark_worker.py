"""The DSpark worker: draft a block, verify it with replay records, accept, commit.

SGLang's scheduler drives it through its speculative V2 schema under the name DSPARK, with overlap or without.
One decode step, top-down in `_decode`; what the host must not wait for stays in tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_spec, mamba_track_grid
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.draft_worker_common import (
    build_block_pos_offsets,
    build_draft_tp_worker,
    make_draft_input_v2,
)
from sglang.srt.speculative.dspark_components.dspark_planner import VerifyWindow, alloc_verify_window
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_k3 import registration
from sglang_k3.attention_backends import NAME
from sglang_k3.attention_backends.hybrid import K3HybridBackend
from sglang_k3.kernels.registry import choose
from sglang_k3.models.dspark_draft import DSparkDraftModel
from sglang_k3.models.kimi_k3 import KimiK3LinearForCausalLM, Taps
from sglang_k3.models.runtime import kernel_call
from sglang_k3.speculative import sampling_rows
from sglang_k3.speculative.acceptance import Accepted, accept_by_rejection, accept_equal, choose_rows
from sglang_k3.speculative.proposer import Proposal, Proposer
from sglang_k3.speculative.ragged_rows import RaggedRows
from sglang_k3.speculative.row_penalties import RowPenalties
from sglang_k3.speculative.row_planner import RowPlanner
from sglang_k3.speculative.simulated_acceptance import simulated
from sglang_k3.speculative.stops import RunLimits

logger = logging.getLogger(__name__)

_DRAFT_NOISE = 0x6B3D5A
"""Sets the noise of drafts and acceptance apart from the plain sampler's, whose seed is the server's."""


class K3DSparkWorker(BaseSpecWorker):
    """Target and draft of one rank. Raises ConfigError for a draft that does not fit the target."""

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        registration.verify()
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.device = target_worker.device
        target = self._target_model()
        bundle = build_draft_tp_worker(
            server_args=server_args,
            gpu_id=gpu_id,
            nccl_port=nccl_port,
            target_model_config=self.model_runner.model_config,
            algo_label="DSPARK",
            attention_backend_override=NAME if torch.device(target_worker.device).type == "cpu" else "ascend",
            random_seed=target_worker.random_seed,
        )
        self._draft_worker = bundle.draft_worker
        self.draft_model_runner = bundle.draft_model_runner
        draft = bundle.draft_model
        assert isinstance(draft, DSparkDraftModel)
        self.draft_model = draft
        self._check_draft(self.model_runner.model_config)
        target.model.taps = Taps.of(
            draft.draft_config.tapped_layers, target.text.num_layers, draft.draft_config.mixture
        )
        draft.share(target.get_input_embeddings(), target.lm_head)
        self.rows = int(get_spec().speculative_num_draft_tokens)
        self.speculative_num_draft_tokens = self.rows
        self._offsets = build_block_pos_offsets(length=self.rows, device=self.device)
        self._generator = torch.Generator(self.device)
        self._generator.manual_seed(target_worker.random_seed ^ _DRAFT_NOISE)
        self._chain = choose("acceptance.chain", kernel_call(self.model_runner.dtype))
        self._limits = RunLimits(self.device)
        self._planner = RowPlanner(self.rows, target.text, self.device)
        self._penalties = RowPenalties(target.text.vocab_size, self.device)
        self._simulated = simulated(self._planner.agree)
        logger.info(
            "DSpark: %d drafts a step, %s, taps %s (%s)",
            self.rows - 1,
            self._planner.what,
            list(draft.draft_config.tapped_layers),
            "mixture" if draft.draft_config.mixture else "prefix",
        )

    def __getattr__(self, name: str) -> Any:
        """What the scheduler asks of a worker in general is the target worker's answer."""
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    def _target_model(self) -> KimiK3LinearForCausalLM:
        model = self.model_runner.model
        assert isinstance(model, KimiK3LinearForCausalLM)
        return model

    def _check_draft(self, target: ModelConfig) -> None:
        text = self._target_model().text
        self.draft_model.draft_config.check_target(
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            num_layers=text.num_layers,
            max_positions=target.context_len,
        )

    # --- what SGLang asks of a worker at start-up -------------------------------------------------------

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        self._proposer = Proposer(self.draft_model, self.draft_model_runner.token_to_kv_pool, self._generator)

    @property
    def attn_backend(self) -> K3HybridBackend:
        backend = self.model_runner.attn_backend
        assert isinstance(backend, K3HybridBackend)
        return backend

    @property
    def _request_pool(self) -> HybridReqToTokenPool:
        pool = self.model_runner.req_to_token_pool
        assert isinstance(pool, HybridReqToTokenPool)
        return pool

    @property
    def spec_v2_attn_backends(self) -> tuple:
        return (self.model_runner.attn_backend, self.draft_model_runner.attn_backend)

    def init_cuda_graphs(self) -> None:
        self._draft_worker.init_cuda_graphs(capture_decode_cuda_graph=False)

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        """None: what updates a target's weights has no tensor of the draft's, which has a checkpoint of its
        own and reads the target's embedding and head where they are."""
        return []

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        self._penalties.forget(rid)
        self._planner.forget(rid)

    def show_budget(self, labels: Mapping[str, str] | None) -> None:
        """labels: Prometheus's; None where nobody asked for metrics."""
        self._planner.show(labels)

    def block_accept_estimate_log_suffix(self) -> str | None:
        """Of the scheduler's line about a decode batch."""
        return self._planner.summary()

    # SGLang's worker keeps statistics for its own budget; the scheduler asks every DSPARK worker for them.

    def dump_info_records(self) -> dict | None:
        return None

    def clear_info_records(self) -> None:
        pass

    def get_confidence_budget_prepare(self) -> None:
        return None

    # --- one step ---------------------------------------------------------------------------------------

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish=None, grammar_barrier=None, *, pp_proxy_tensors=None
    ) -> GenerationBatchResult:
        """See SGLang's BaseSpecWorker. on_publish(new_seq_lens) is called as soon as lengths are known."""
        if batch.forward_mode.is_idle():
            return self._idle(on_publish)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish, grammar_barrier)

    def _idle(self, on_publish) -> GenerationBatchResult:
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        if on_publish is not None:
            on_publish(nothing)
        return GenerationBatchResult(
            logits_output=None,
            next_token_ids=nothing,
            accept_lens=nothing.to(torch.int32),
            next_draft_input=make_draft_input_v2(bonus_tokens=nothing, new_seq_lens=nothing),
            can_run_cuda_graph=False,
            speculative_num_draft_tokens=self.rows,
            new_seq_lens=nothing,
        )

    def _prefill(self, batch: ScheduleBatch, on_publish) -> GenerationBatchResult:
        """The target's prefill; its hidden states become the draft's context at the tokens' own positions."""
        assert batch.extend_lens is not None and batch.prefix_lens is not None
        positions = torch.cat(
            [
                torch.arange(begin, begin + length)
                for begin, length in zip(batch.prefix_lens, batch.extend_lens, strict=True)
            ]
        ).to(self.device)
        slots = batch.out_cache_loc
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        first_tokens = result.next_token_ids
        assert isinstance(first_tokens, torch.Tensor)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        self._write_context(result.logits_output, positions, slots)
        self._penalties.begin(batch.reqs, first_tokens)
        result.next_draft_input = make_draft_input_v2(bonus_tokens=first_tokens, new_seq_lens=batch.seq_lens)
        return result

    def _write_context(self, output: Any, positions: torch.Tensor, slots: torch.Tensor) -> None:
        hidden = output.hidden_states
        if hidden is None or hidden.shape[0] != positions.shape[0]:
            found = "none" if hidden is None else f"{hidden.shape[0]} rows"
            raise RuntimeError(f"the target returned {found} of hidden states for {len(positions)} tokens")
        self.draft_model.write_context(hidden, positions, slots, self.draft_model_runner.token_to_kv_pool)
        output.hidden_states = None  # nobody else wants them, and overlap would copy them to the host

    def _decode(self, batch: ScheduleBatch, on_publish, grammar_barrier) -> GenerationBatchResult:
        draft_input = batch.spec_info
        assert isinstance(draft_input, DFlashDraftInputV2)
        depths = batch.seq_lens
        anchors = draft_input.bonus_tokens.view(-1)
        step = self._planner.begin(batch.reqs, depths, batch.sampling_info)
        proposal = self._propose(batch, anchors, step.drafting)
        rows = step.drafted(proposal)
        candidates = torch.cat([anchors.unsqueeze(1), proposal.tokens], 1)[:, : rows.width]
        window = self._window(batch, rows.width)
        output, can_run_graph = self._verify(batch, candidates, window, rows)
        logits = output.next_token_logits
        self._adjust(batch, logits, candidates, grammar_barrier)
        accepted = self._accept(batch, logits, candidates, proposal, window).limited(rows.counts)
        accepted = accepted.limited(self._limits.of(batch.reqs, depths, accepted.tokens))
        # Drafts behind the accepted ones leave nothing in the state.
        counted = self._offsets[: rows.width] < accepted.counts.unsqueeze(1)
        output.broken_rows &= counted.flatten()
        self._penalties.accept(batch.reqs, accepted.counts, accepted.anchors)
        if batch.return_logprob:
            compute_spec_logprobs(batch, output, accepted.tokens.reshape(-1), chain_stride=rows.width)
        new_seq_lens = depths + accepted.counts
        if on_publish is not None:
            on_publish(new_seq_lens)
        self._commit(batch, depths, accepted.counts)
        # Rows behind the accepted ones go to slots that this request overwrites before anything reads them.
        positions, slots = rows.pack(window.positions_2d), rows.pack(window.verify_cache_loc_2d)
        self._write_context(output, positions, slots)
        step.done(accepted.counts)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=accepted.tokens.reshape(-1),
            accept_lens=accepted.counts.to(torch.int32),
            next_draft_input=make_draft_input_v2(bonus_tokens=accepted.anchors, new_seq_lens=new_seq_lens),
            can_run_cuda_graph=can_run_graph,
            speculative_num_draft_tokens=self.rows,
            speculative_output_stride=rows.width,
            new_seq_lens=new_seq_lens,
        )

    def _window(self, batch: ScheduleBatch, width: int) -> VerifyWindow:
        """Positions and cache slots of the rows behind each request's committed tokens."""
        return alloc_verify_window(
            batch=batch,
            bs=len(batch.seq_lens),
            device=self.device,
            verify_num_draft_tokens=width,
            block_pos_offsets=self._offsets[:width],
            model_runner=self.model_runner,
            seq_lens_cpu=self._host_lens(batch),
        )

    def _propose(
        self, batch: ScheduleBatch, anchors: torch.Tensor, drafting: torch.Tensor | None
    ) -> Proposal:
        """Drafts for the requests where drafting [N] bool; None: for all."""
        if drafting is not None and not bool(drafting.any()):
            return Proposal(anchors.new_zeros(len(anchors), self.rows - 1), None, None)
        temperatures = self._draft_temperatures(batch)
        asked = anchors, batch.seq_lens, batch.req_pool_indices
        if drafting is not None:
            asked = tuple(each[drafting] for each in asked)
            temperatures = None if temperatures is None else temperatures[drafting]
        tokens, lens, request_rows = asked
        table = self._table(batch)
        proposal = self._proposer.propose(tokens, lens, table, request_rows, temperatures)
        return proposal if drafting is None else proposal.spread(drafting)

    def _table(self, batch: ScheduleBatch) -> torch.Tensor:
        """Where requests' tokens lie; on a device no wider than the longest of them, as far as the host
        knows, because operators there bound their work by it."""
        table = self._request_pool.req_to_token
        if table.device.type == "cpu":
            return table
        lens = self._host_lens(batch)
        return table[:, : int(lens.max())] if len(lens) else table[:, :0]

    def _host_lens(self, batch: ScheduleBatch) -> torch.Tensor:
        """[N] at least the committed tokens of each request, without asking the device."""
        if batch.seq_lens_cpu is not None:
            return batch.seq_lens_cpu
        assert isinstance(batch.spec_info, DFlashDraftInputV2)
        return batch.spec_info.nxt_kv_lens_cpu

    def _draft_temperatures(self, batch: ScheduleBatch) -> torch.Tensor | None:
        """[N, 1], 0 for greedy requests; None when drafts are to be the likeliest tokens throughout."""
        info = batch.sampling_info
        if info.is_all_greedy or info.sampling_seed is not None:
            return None
        return torch.where(info.top_ks.view(-1, 1) <= 1, 0.0, info.temperatures)

    def _verify(
        self, batch: ScheduleBatch, candidates: torch.Tensor, window: VerifyWindow, rows: RaggedRows
    ) -> tuple[Any, bool]:
        """The target on the rows of all requests at once: logits [N * width, V], zero for rows that are not
        computed, and hidden states of those that are."""
        layout = rows.layout()
        verify = DFlashVerifyInput(
            draft_token=rows.pack(candidates),
            positions=rows.pack(window.positions_2d),
            draft_token_num=rows.width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            live_seq_lens_cpu=self._host_lens(batch),
            # SGLang plans for as many rows of each request; otherwise it makes a plan of the slots alone.
            kv_loc_plan=window.kv_loc_plan if layout is None else None,
            ragged_verify_layout=layout,
        )
        batch.out_cache_loc = rows.pack(window.verify_cache_loc_2d)
        # An eager forward plans a verify itself, whatever was planned before.
        forward_batch, can_run_graph = verify.prepare_for_verify(
            batch, self.target_worker, defer_metadata_init=True
        )
        result = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
        output: Any = result.logits_output
        output.next_token_logits = rows.unpack(output.next_token_logits)
        output.broken_rows = rows.unpack(output.broken_rows)
        return output, can_run_graph

    def _adjust(
        self, batch: ScheduleBatch, logits: torch.Tensor, candidates: torch.Tensor, grammar_barrier
    ) -> None:
        """What the requests ask to be done to logits, row by row, in the plain sampler's order."""
        info = batch.sampling_info
        per_request = logits.view(*candidates.shape, -1)
        self._penalties.apply(batch.reqs, per_request, candidates)
        if batch.has_grammar:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=GrammarTree.from_linear_chain(candidates),
                sampling_info=info,
                device=logits.device,
                barrier=grammar_barrier,
            )
            if mask is not None:
                mask.apply(logits)
        if info.logit_bias is not None:
            per_request.add_(info.logit_bias.unsqueeze(1))
        if info.has_custom_logit_processor:
            apply_custom_logit_processor(logits, info, num_tokens_in_batch=candidates.shape[1])

    def _accept(
        self,
        batch: ScheduleBatch,
        logits: torch.Tensor,
        candidates: torch.Tensor,
        proposal: Proposal,
        window: VerifyWindow,
    ) -> Accepted:
        info = batch.sampling_info
        if self._simulated is not None:
            return self._simulated.accept(candidates, logits.argmax(-1).view(candidates.shape))
        if info.is_all_greedy:
            return accept_equal(candidates, logits.argmax(-1).view(candidates.shape), self._chain)
        positions = window.positions_2d.reshape(-1)
        rows = sampling_rows.for_rows(info, candidates.shape[1])
        if proposal.distributions is None:
            # The sampler works in place, and logprobs are asked for afterwards.
            chosen = sampling_rows.choose(self.model_runner.sampler, logits.clone(), rows, positions)
            return accept_equal(candidates, chosen.view(candidates.shape), self._chain)
        drawn_from = proposal.distributions[:, : candidates.shape[1] - 1]
        target = sampling_rows.probabilities(logits, rows, positions).view(*candidates.shape, -1)
        sampled = accept_by_rejection(candidates, target, drawn_from, self._generator)
        greedy = accept_equal(candidates, logits.argmax(-1).view(candidates.shape), self._chain)
        return choose_rows(info.top_ks.view(-1) <= 1, greedy, sampled)

    def _commit(self, batch: ScheduleBatch, depths: torch.Tensor, counts: torch.Tensor) -> None:
        """Accepted tokens enter the KDA states, and a checkpoint boundary among them its track slot."""
        offsets = torch.full_like(depths, -1)
        slots = offsets
        if batch.mamba_track_indices is not None:
            grid = mamba_track_grid(batch.tree_cache.page_size)
            boundary = (depths + counts) // grid * grid
            offsets = torch.where(boundary > depths, boundary - depths, offsets)
            slots = self._request_pool.translate_mamba_indices(batch.mamba_track_indices).to(torch.int64)
        self.attn_backend.commit(batch.req_pool_indices, depths, counts, offsets, slots)
