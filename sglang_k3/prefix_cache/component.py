"""KDA states in SGLang's radix tree: a hit is the deepest place where KV and a state exist.

The tree, its nodes and locks, the ping-pong buffers and copy-on-write are SGLang's. Ours is what happens
where SGLang gives up: a pool without a free slot means fewer hits and a line in the log, never the end of
the server, and what a prompt lost is counted with its reason.
"""

from __future__ import annotations

import logging
from typing import Any, cast
from weakref import WeakSet

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    zero_match_result,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import EvictLayer, LRURefreshPhase, MambaComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from sglang_k3.broken_requests import is_broken
from sglang_k3.prefix_cache import anchors, eviction
from sglang_k3.prefix_cache.events_recorder import StateRecorder
from sglang_k3.prefix_cache.metrics import Metrics, Slots
from sglang_k3.prefix_cache.outcome import Outcome, outcome_of
from sglang_k3.speculative.state_pool import records_of

logger = logging.getLogger(__name__)


def token_bytes(allocator: Any) -> int:
    """Bytes of one token's KV, all layers of this rank."""
    pool = allocator.get_kvcache()
    sizes = pool.get_kv_size_bytes()
    return int(sum(sizes) if isinstance(sizes, tuple) else sizes) // max(1, pool.size)


class NoSlot(Exception):
    """Every slot of the state pool is in use, and no cached state may go."""


def _only_if(message: str, error: AssertionError) -> None:
    """SGLang says "no slot" by an assertion; any other one is an error and is raised again."""
    if message not in str(error):
        raise error


class KDAStateComponent(MambaComponent):
    """Registered for SGLang's MAMBA component; needs the Python tree core (SGLang takes it by itself for
    components that are not its own)."""

    def __init__(
        self,
        cache: Any,
        params: CacheInitParams,
        policy: str = "lru",
        config: dict[str, Any] | None = None,
        cost: eviction.PrefillCost = eviction.UNMEASURED,
    ) -> None:
        """policy, config: of `eviction.make`. cost: of prefill on this server."""
        super().__init__(cache, params)
        # Our kernels keep a state at any depth; only whole pages can be keys.
        self.mamba_checkpoint_grid = params.page_size
        self.pool = cast(HybridReqToTokenPool, params.req_to_token_pool)
        cached = self.pool.mamba_pool.mamba_cache
        slot_bytes = sum(t.nbytes // t.shape[1] for t in (cached.temporal, *cached.conv))
        labels = cache.metrics_collector.labels if params.enable_metrics else None
        self.metrics = Metrics(labels, slot_bytes)
        self._stripped: WeakSet[Any] = WeakSet()
        """Nodes whose state was evicted and whose KV stayed."""
        kv = self.cache.token_to_kv_pool_allocator
        self.surroundings = eviction.Surroundings(
            holds=self._holds, cost=cost, state_bytes=slot_bytes, token_bytes=token_bytes(kv)
        )
        self.eviction = eviction.make(policy, config, self.surroundings)
        self.events: StateRecorder | None = None

    # --- a request starts --------------------------------------------------------------------------------

    def finalize_match_result_in_cache(self, params: MatchPrefixParams, result: MatchResult) -> MatchResult:
        """Notes what was found, and takes the slot that the found state is copied into."""
        if not params.cow_mamba or params.req is None:
            return super().finalize_match_result_in_cache(params, result)
        outcome = self._outcome(params, result)
        if self._state_at(result.best_match_node) is not None and not params.req.kv.holds_mamba:
            slot = self.take_slot(result.best_match_node)
            if slot is None:
                self._say_full("a cached prefix of %d tokens is computed again", outcome.hit)
                outcome = outcome.without_slot()
                result = zero_match_result(self.cache, result, params.key.extra_key)
            else:
                params.req.kv.mamba_pool_idx = slot
        if not params.req.retracted_stain:
            params.req.prefix_outcome = outcome  # type: ignore[attr-defined]
            params.req.prefix_end = result.last_visited_node_id, result.full_kv_hit_length  # type: ignore[attr-defined]
        return super().finalize_match_result_in_cache(params, result)

    def reserve(self, req: Any) -> bool:
        """Give a request every slot that it starts with, or none. The same slots are allocated and
        admitted, so that no request is admitted and then left without.

        Whatever a refused request holds is given back by `give_back`.
        """
        pool = self.pool
        # SGLang sets slots aside for matches of the whole queue; those are free for this request too.
        pool.mamba_allocator.alloc_group_end()
        if not req.kv.holds_mamba:
            slot = self.take_slot(req.last_node)
            if slot is None:
                return self._must_wait(req)
            req.kv.mamba_pool_idx = slot
            req.kv.mamba_needs_clear = True
        untracked = pool.enable_mamba_extra_buffer and req.kv.mamba_ping_pong_track_buffer is None
        if untracked and not self._take_tracking_slots(req):
            return self._must_wait(req)
        return True

    def give_back(self, req: Any, tracking: bool) -> None:
        """Free the slots of a request that does not start after all, its prefix's copy with them. tracking:
        its tracking buffers too. A slot that came with a session's cached tokens stays the session's."""
        allocator = self.pool.mamba_allocator
        kv = req.kv
        if tracking and kv.mamba_ping_pong_track_buffer is not None:
            self._free_tracking_slots(kv)
        kv.mamba_cow_src_index, kv.mamba_needs_clear = None, False
        if kv.holds_mamba and not kv.holds_kv:
            allocator.free(kv.mamba_pool_idx.unsqueeze(0))
            kv.mamba_pool_idx = None

    def _free_tracking_slots(self, kv: Any) -> None:
        buffers = kv.mamba_ping_pong_track_buffer
        self.pool.mamba_allocator.free(buffers[buffers >= 0])
        kv.mamba_ping_pong_track_buffer = kv.mamba_ping_pong_empty = None
        kv.mamba_next_track_idx = kv.mamba_last_track_idx = None

    def admitted(self, req: Any) -> None:
        """Counts the request's outcome, once: not again when it comes back from a retraction."""
        if not req.retracted_stain:
            # A turn of a streaming session goes on where its slot is, without a match.
            outcome = getattr(req, "prefix_outcome", Outcome(hit=req.prefix_len))
            self.metrics.count(outcome, len(req.origin_input_ids))
            if self.eviction is not None:
                node, kv = getattr(req, "prefix_end", (None, 0))
                self.eviction.started(req, None if node is None else self._tree._node_arena.get(node), kv)

    def take_slot(self, keep: int | None = None) -> torch.Tensor | None:
        """A slot, [] int64, for which a cached state may go that nobody holds, but not node `keep`'s; None if
        none can."""
        allocator = self.pool.mamba_allocator
        slots = allocator.alloc(1)
        if slots is None:
            self._make_room(1, keep)
            slots = allocator.alloc(1)
        return None if slots is None else slots[0]

    def _take_tracking_slots(self, req: Any) -> bool:
        pool = self.pool
        for _ in range(2):
            try:
                pool._alloc_ping_pong_buffer(req)
            except AssertionError as error:
                _only_if("Not enough space for mamba", error)
                self._make_room(pool.mamba_initial_tracking_slots, req.last_node)
            else:
                return True
        return False

    def _make_room(self, count: int, keep: int | None) -> None:
        """Evict cached states until so many slots are free, or none is left that may go."""
        missing = count - self.pool.mamba_allocator.schedulable_available_size()
        evict = EvictParams(num_tokens=0, mamba_num=max(0, missing))
        if keep is None:
            self.cache.evict_for_alloc(evict)
            return
        lock = self.cache.inc_lock_ref(keep)
        self.cache.evict_for_alloc(evict)
        self.cache.dec_lock_ref(keep, lock.to_dec_params())

    def _must_wait(self, req: Any) -> bool:
        self.metrics.wait()
        self._say_full("request %s waits", req.rid)
        return False

    # --- a request keeps a state -------------------------------------------------------------------------

    def _alloc_mamba_slot(self, req: Any = None) -> torch.Tensor:
        """Raises NoSlot where SGLang's would end the scheduler."""
        try:
            return super()._alloc_mamba_slot(req)
        except AssertionError as error:
            _only_if("Can not alloc mamba cache", error)
            raise NoSlot from error

    def prepare_for_caching_req(
        self, req: Any, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """The depth of the state that goes into the tree; 0 where no slot can take its place."""
        records = records_of(self.pool)
        if records is not None and is_finished and not self.pool.enable_mamba_extra_buffer:
            # The running slot itself goes into the tree.
            slot = self.pool.translate_mamba_indices(req.kv.mamba_pool_idx.view(1))
            records.settle_slots(self.pool.mamba_pool, slot)
        try:
            if anchors.anchored(self.pool):
                return self._anchor_for_tree(req, insert_params, token_ids_len, is_finished)
            return super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)
        except NoSlot:
            self.metrics.skip()
            self._say_full("the state of request %s is not kept", req.rid)
            return 0

    def _anchor_for_tree(
        self, req: Any, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """Of a prompt's end the slot that took its checkpoint, for which the request needs no other; of a
        finished request its own slot."""
        prefilled = token_ids_len >= len(req.full_untruncated_fill_ids)
        if anchors.holds_prompt_slot(req.kv) and (is_finished or not prefilled):
            return super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)
        depth = req.kv.mamba_last_track_seqlen or 0
        if is_finished:
            if not 0 < depth <= token_ids_len:
                return 0
            slot = req.kv.mamba_pool_idx.unsqueeze(0).clone()
            records = records_of(self.pool)
            assert records is not None
            # The tail behind it ends with the request.
            records.forget_slots(self.pool.translate_mamba_indices(slot))
            insert_params.mamba_value = slot
            return depth
        slot = anchors.take_prompt_slot(self.pool, req)
        if depth == 0:
            self.pool.mamba_allocator.free(slot)
        else:
            insert_params.mamba_value = slot
        return depth

    def _gives_anchor(self, insert_params: InsertParams) -> bool:
        """Whether a finished request hands on its own slot, not one of its tracking buffers."""
        own = insert_params.mamba_value is not None and insert_params.mamba_keep_idx is None
        return own and anchors.anchored(self.pool)

    def cleanup_after_caching_req(
        self,
        req: Any,
        is_finished: bool,
        insert_result: InsertResult | None = None,
        insert_params: InsertParams | None = None,
    ) -> None:
        if is_finished and is_broken(req):
            self._scrub(req.kv)
        inserted = insert_result is not None and not insert_result.mamba_exist
        if is_finished and inserted and insert_params is not None and self._gives_anchor(insert_params):
            self._free_tracking_slots(req.kv)
            req.kv.mamba_pool_idx = None
            req.kv.mamba_last_track_seqlen = req.kv.mamba_prev_track_seqlen = None
        else:
            super().cleanup_after_caching_req(req, is_finished, insert_result, insert_params)
        if (
            self.eviction is not None
            and insert_result is not None
            and insert_result.last_device_node is not None
        ):
            self.eviction.kept(req, self._tree.node_by_id(insert_result.last_device_node))

    def _scrub(self, kv: Any) -> None:
        """Zero the slots that a request with NaN in its state gives back."""
        owned = [kv.mamba_pool_idx.view(1)] if kv.holds_mamba else []
        if kv.mamba_ping_pong_track_buffer is not None:
            owned.append(kv.mamba_ping_pong_track_buffer[kv.mamba_ping_pong_track_buffer >= 0])
        pool = self.pool
        for slots in owned:
            pool.mamba_pool.clear_slots(pool.translate_mamba_indices(slots))

    def commit_insert_component_data(self, node: Any, *rest: Any, **named: Any) -> None:
        held = self._holds(node)
        super().commit_insert_component_data(node, *rest, **named)
        self._stripped.discard(node)
        if self.events is not None and not held:
            self.events.state_stored(node)

    def redistribute_on_node_split(self, new_parent: Any, child: Any) -> None:
        super().redistribute_on_node_split(new_parent, child)
        if self.events is not None:
            self.events.split(new_parent, child)

    # --- a state goes ------------------------------------------------------------------------------------

    def evict_component(
        self,
        node: Any,
        device_frees: Any,
        host_frees: Any,
        cache_actions: Any,
        target: EvictLayer = EvictLayer.DEVICE,
    ) -> tuple[int, int]:
        held = node.component_data[self.component_type].value is not None
        freed = super().evict_component(node, device_frees, host_frees, cache_actions, target)
        if held and node.component_data[self.component_type].value is None:
            self._stripped.add(node)
            if self.events is not None:
                self.events.state_gone(node)
        return freed

    def refresh_lru(self, phase: LRURefreshPhase, node: Any, root_node: Any) -> None:
        super().refresh_lru(phase, node, root_node)
        if phase is LRURefreshPhase.MATCH_END and self.eviction is not None and self.eviction.refreshes_path:
            order = self._tree.lru_lists[self.component_type]
            order.reset_node_and_parents_mru(node, root_node, self._holds)

    def discard_deleted_session_leaf(self, node: Any) -> None:
        """SGLang tells a component of each node that leaves the tree."""
        super().discard_deleted_session_leaf(node)
        if self.eviction is not None:
            self.eviction.dropped(node)

    def reset_session_state(self) -> None:
        """SGLang's word for: the tree was emptied."""
        super().reset_session_state()
        if self.eviction is not None:
            self.eviction.clear()

    def _evict_device_next_node(self, *rest: Any, **named: Any) -> Any:
        """SGLang's walk takes the state under its cursor; which that is, our policy says."""
        if self.eviction is not None:
            states = self._may_go()
            self._evict_device_cursor = self.eviction.victim(states) if states else None
        return super()._evict_device_next_node(*rest, **named)

    def _may_go(self) -> list[Any]:
        """Nodes with a state that no request holds, the longest unused first. Where sessions are told apart,
        those of no session alone as long as there are any."""
        order, kind = self._tree.lru_lists[self.component_type], self.component_type
        found, node = [], order.get_lru_no_lock()
        while node is not None:
            found.append(node)
            node = order.get_prev_no_lock(node)
        if self._tree.enable_session_radix_cache:
            found = [node for node in found if node.component_data[kind].session_ref == 0] or found
        return found

    def _holds(self, node: Any) -> bool:
        return node.component_data[self.component_type].value is not None

    # --- what is told about it ---------------------------------------------------------------------------

    def _state_at(self, node: int) -> torch.Tensor | None:
        return self._tree.get_component_device_value(node, self.component_type)

    @property
    def _tree(self) -> UnifiedTreeCore:
        """The Python tree core, which lends out its nodes."""
        return cast(UnifiedTreeCore, self.tree_core)

    def _outcome(self, params: MatchPrefixParams, result: MatchResult) -> Outcome:
        hit, kv = result.device_prefix_len, result.full_kv_hit_length
        page = self.cache.page_size
        key = params.key.page_aligned(page)
        node, depth, evicted_to = self._tree.node_by_id(result.best_match_node), hit, hit
        while depth < kv:
            node = node.children.get(key.child_key_at(depth, page))
            if node is None or node.key is None:
                break
            depth += len(node.key)
            if depth <= kv and node in self._stripped:
                evicted_to = depth
        return outcome_of(kv, hit, self.mamba_checkpoint_grid, evicted_to)

    def show_slots(self) -> None:
        self.metrics.show(self.slots)

    def slots(self) -> Slots:
        """Every slot of the pool by who has it."""
        pool = self.pool
        free = pool.mamba_allocator.available_size()
        cached = self.cache.mamba_evictable_size() + self.cache.mamba_protected_size()
        # Row 0 of the request table stands for padding and is never handed out.
        running = pool.size - pool.available_size()
        total = pool.mamba_pool.size
        return Slots(running=running, cached=cached, held=total - free - cached - running, free=free)

    def _say_full(self, consequence: str, *values: object) -> None:
        """One line for each time the pool runs full, not for each request that feels it."""
        if self.metrics.should_say():
            logger.warning(
                "No free KDA state slot: " + consequence + ". %s. More with --max-mamba-cache-size.",
                *values,
                self.slots(),
            )
