"""SGLang's scheduler in this process, one turn of its event loop at a time.

A server shows texts. Here a test or benchmark sees pools and slots between two turns, and can admit,
abort and retract exactly there. SGLang keeps one configuration a process, so a process starts one loop.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from typing import Any


class LoopFailed(RuntimeError):
    """The scheduler's event loop ended with an exception, which is the cause."""


class _Mute:
    """Takes the place of a socket to another process."""

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        pass


class Loop:
    """The scheduler, its real event loop (with overlap or without) held at the start of each turn.

    flags: launch_server's, model and all.
    """

    def __init__(self, *flags: str, device: str = "cpu") -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.benchmark import one_batch
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.server_args import PortArgs, prepare_server_args

        server_args = prepare_server_args(["--device", device, "--log-level", "error", *flags])
        server_args.resolve_once()
        ports = PortArgs.init_new(server_args)
        rank = one_batch.spawn_world_rank(server_args, tp_rank=0, pp_rank=0)
        ranks = one_batch.SpawnRanks(world_rank=rank, gpu_id=0)
        one_batch.publish(server_args, role="scheduler", ranks=ranks)
        self.scheduler: Any = Scheduler(server_args, ports)
        self.scheduler.output_streamer.send_to_detokenizer = _Mute()
        self.scheduler.ingest_requests = self._ingest
        self._incoming: list[Any] = []
        self._go, self._held = threading.Semaphore(0), threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._wait()

    @property
    def worker(self) -> Any:
        """The speculative worker, or the plain one."""
        return self.scheduler.draft_worker or self.scheduler.tp_worker

    def _run(self) -> None:
        try:
            self.scheduler.run_event_loop()
        except BaseException as error:
            self._failure = error
        self._held.release()

    def _ingest(self) -> None:
        self._held.release()
        self._go.acquire()
        incoming, self._incoming = self._incoming, []
        if incoming:
            self.scheduler.process_input_requests(incoming)

    def _wait(self) -> None:
        # The thread of a failed loop is gone, and would be waited for in vain.
        if self._failure is None:
            self._held.acquire()
        if self._failure is not None:
            raise LoopFailed(f"{type(self._failure).__name__}: {self._failure}") from self._failure

    def step(self, turns: int = 1) -> None:
        """Let so many turns of the event loop pass. Raises LoopFailed."""
        for _ in range(turns):
            self._go.release()
            self._wait()

    def admit(
        self, rid: str, ids: Sequence[int], new_tokens: int, *, logprobs: bool = False, **sampling: Any
    ) -> Any:
        """Hand in a request and let the turn pass that queues (and perhaps starts) it; SGLang's Req.

        Greedy and deaf to end-of-sequence unless `sampling` says otherwise. logprobs: of the new tokens.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        options = {"temperature": 0.0, "ignore_eos": True, **sampling}
        params = SamplingParams(max_new_tokens=new_tokens, **options)
        params.normalize(self.scheduler.tokenizer)
        made: list[Any] = []
        queue = self.scheduler._add_request_to_queue

        def remember(req: Any, *args: Any, **kwargs: Any) -> Any:
            made.append(req)
            return queue(req, *args, **kwargs)

        self.scheduler._add_request_to_queue = remember
        self._incoming.append(
            TokenizedGenerateReqInput(
                rid=rid,
                input_text="",
                input_ids=array("q", ids),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=params,
                return_logprob=logprobs,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
            )
        )
        try:
            self.step()
        finally:
            self.scheduler._add_request_to_queue = queue
        return made[0]

    def abort(self, rid: str) -> None:
        """Ask for the request's end; takes a turn."""
        from sglang.srt.managers.io_struct import AbortReq

        self._incoming.append(AbortReq(rid=rid))
        self.step()

    def retract(self) -> None:
        """A turn in which the scheduler takes running requests back into the queue, as for want of memory."""
        from sglang.srt.managers import scheduler as module

        before = module.TEST_RETRACT, module.TEST_RETRACT_INTERVAL
        module.TEST_RETRACT, module.TEST_RETRACT_INTERVAL = True, 1
        try:
            self.step()
        finally:
            module.TEST_RETRACT, module.TEST_RETRACT_INTERVAL = before

    def finish(self, *requests: Any, limit: int = 5000) -> None:
        """Turns until these have ended and their results are in. Raises LoopFailed after `limit` turns."""
        for _ in range(limit):
            if all(request.finished() for request in requests):
                self.step(3)
                return
            self.step()
        raise LoopFailed(f"requests still running after {limit} turns")

    def tell(self, message: Any) -> Any:
        """The scheduler's answer to one of SGLang's other messages, between two turns."""
        return self.scheduler._request_dispatcher(message)

    def flush(self) -> None:
        """Empty the prefix cache; every request must have ended."""
        self.step(3)
        if not self.scheduler.flush_cache(empty_cache=False):
            raise LoopFailed("the cache could not be flushed: a request is still running")
