"""One vLLM instance in a storm: the real scheduler, the real connector on both sides, and steps in flight."""

import pickle
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from pegaflow.connector import PegaKVConnector, compat
from pegaflow.connector.guard import MustStop
from pegaflow.connector.shard_worker import ShardWorkerHalf
from tests.storm import vllm_objects
from tests.storm.copier import Layout, StormCopier, Tally
from tests.storm.plan import ADAPTERS, EnginePlan, RequestPlan
from tests.storm.runner import Runner
from tests.storm.texts import Text, chance

READY_SECONDS_MAX = 240.0
HISTORY_MAX = 3_000
"""Lines that are remembered of an engine."""


@dataclass
class Client:
    """Who has sent a request, and what has come back."""

    plan: RequestPlan
    text: Text
    tokens: list[int] = field(default_factory=list)
    ended: str | None = None
    ticks_in_state: int = 0


@dataclass
class InFlight:
    """A step that was scheduled."""

    step: Any
    output: Any = None


class Engine:
    """One instance. ``tick`` does what vLLM's engine does between two looks at its queue."""

    def __init__(self, plan: EnginePlan, number: int, seed: int, pool: dict[str, Any], tally: Tally) -> None:
        self.plan, self.number, self.seed, self._tally = plan, number, seed, tally
        self.clients: dict[str, Client] = {}
        self.ticks = 0
        self.updates = 0
        self.preempted = 0
        self.progress = 0
        """Steps that had something to do."""
        self.dead = False
        """Whether a worker has said that the engine must not go on."""
        self.wanted: str | None = None
        """``update`` or ``sleep``, until it can be done."""
        self.history: deque[str] = deque(maxlen=HISTORY_MAX)
        self._in_flight: deque[InFlight] = deque()
        self.config = vllm_objects.engine_config(plan, pool)
        caches, *blocks = vllm_objects.cache_config(plan, self.config)
        self._hash_tokens = blocks[1]
        self.copiers: list[StormCopier] = []
        self.runners = [self._start_rank(rank, caches) for rank in range(plan.ranks)]
        self.scheduler = vllm_objects.scheduler(plan, self.config, caches, (blocks[0], blocks[1]))
        self.connector: Any = self.scheduler.connector
        self.aggregator = KVOutputAggregator.from_connector(self.connector, plan.ranks)
        if not plan.shapes_with_steps:
            shapes = {(0, runner.rank): runner.connector.get_handshake_metadata() for runner in self.runners}
            self.connector.set_xfer_handshake_metadata_pp_aware(shapes)

    def _start_rank(self, rank: int, caches: Any) -> Runner:
        failed_late: set[int] = set()

        def copier(pool: Any, device: str) -> Any:
            assert device == "cpu"
            key = (self.seed, self.number, rank)
            self.copiers.append(StormCopier(pool, key, self.plan.trouble, self._tally, failed_late))
            return self.copiers[-1]

        compat.worker_rank = lambda *arguments: (0, rank)
        connector: Any = PegaKVConnector(self.config, KVConnectorRole.WORKER, caches)
        connector._native = replace(connector._native, copier=copier, layout=Layout.of)
        runner = Runner(self.plan, rank, connector, lambda name: self.clients[name].text, failed_late)
        connector.register_kv_caches(runner.caches)
        return runner

    def get_ready(self) -> None:
        """Threads make namespaces and sample adapters; what happens must not depend on how fast they are."""
        store, adapters = self.connector._store, self.connector._scheduler._adapters
        known = [adapters.of(vllm_objects.adapter(name)) for name in ADAPTERS]
        deadline = time.monotonic() + READY_SECONDS_MAX
        while store.off is None and (store.namespaces() is None or not all(one.usable for one in known)):
            if self.plan.shapes_with_steps:
                self._step()
            assert time.monotonic() < deadline, "the engine was never ready"
            time.sleep(0.001)
        while any(one.queued for one in known if one is not None):
            assert time.monotonic() < deadline, "adapters were never sampled"
            time.sleep(0.001)
        adapters._look = lambda adapter: None
        for runner in self.runners:
            if isinstance(runner.connector._worker, ShardWorkerHalf):
                runner.connector._worker._sampling.join()

    # -- from outside -------------------------------------------------------------------------------------------------

    def add(self, plan: RequestPlan) -> None:
        """A client sends a request."""
        context = f"{plan.salt} {plan.adapter}"
        client = Client(plan, Text(list(plan.prompt), plan.more, context))
        self.clients[plan.name] = client
        self.scheduler.add_request(vllm_objects.request(plan, client.text, self._hash_tokens))

    @property
    def idle(self) -> bool:
        """Whether vLLM would stop stepping this engine."""
        return not self._in_flight and not self.scheduler.has_requests() and self.wanted is None

    def reset(self) -> None:
        """The cache is reset, whatever is going on, and nobody waits for success."""
        running = chance(self.seed, self.number, "reset", self.ticks) < 0.5
        self.history.append(f"tick {self.ticks}: reset{' with running requests' if running else ''}")
        with suppress(RuntimeError):  # vLLM's own: blocks are pinned or being loaded
            self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=True)

    def give_up(self, waiting: bool = False) -> int:
        """The client that was served first, or that is to be next, goes away. Returns how many have."""
        requests = list(self.scheduler.waiting) if waiting else self.scheduler.running
        names = [request.request_id for request in requests[:1]]
        for name in names:
            self.clients[name].ended = "aborted by its client"
            self.history.append(f"tick {self.ticks}: {name} gives up")
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        return len(names)

    def stop(self) -> None:
        """vLLM ends in the middle of everything, in either order."""
        halves: list[Callable[[], object]] = [self.scheduler.shutdown]
        halves += [runner.connector.shutdown for runner in self.runners]
        if chance(self.seed, self.number, "stop", self.ticks) < 0.5:
            halves.reverse()
        for shut_down in halves:
            shut_down()

    def tick(self) -> None:
        """One turn of vLLM's loop."""
        self.ticks += 1
        self._abort()
        if self.wanted is not None and not self._in_flight:
            self._do_wanted()
        if self.scheduler.has_requests() or self._in_flight or self.wanted:
            try:
                self._step()
            except MustStop:
                self.dead = True
                self.history.append(f"tick {self.ticks}: a worker ends the engine")

    # -- steps --------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        depth = 2 if self.plan.asynchronous else 1
        if (self.scheduler.has_requests() and self.wanted is None) or not self._in_flight:
            step = self.scheduler.schedule()
            self._in_flight.append(InFlight(step))
            self.preempted += len(getattr(step, "preempted_req_ids", None) or ())
            self._note(step)
        if chance(self.seed, self.number, "execute", self.ticks) < 0.5:
            self._execute(len(self._in_flight))
        if len(self._in_flight) >= depth or self.wanted is not None or not self.scheduler.has_requests():
            self._execute(1)
            oldest = self._in_flight.popleft()
            self._receive(self.scheduler.update_from_output(oldest.step, oldest.output))

    def _note(self, step: Any) -> None:
        plan, cached = step.kv_connector_metadata, step.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        words = [f"{name} [{computed[name]}..{computed[name] + n})" for name, n in step.num_scheduled_tokens.items()]
        words += [f"load {job.request_id} {[ids for _, _, ids in job.blocks]}" for job in plan.loads]
        words += [f"save {job.job_id} {[ids for _, _, ids in job.blocks]}" for job in plan.saves]
        if step.finished_req_ids:
            words.append(f"finished {sorted(step.finished_req_ids)}")
        if words:
            self.progress += 1
            self.history.append(f"tick {self.ticks}: " + ", ".join(words))

    def _execute(self, count: int) -> None:
        """Let the workers run the oldest steps that they have not run."""
        for flight in list(self._in_flight)[:count]:
            if flight.output is None:
                if len(self.runners) == 1:
                    flight.output = self.runners[0].run(flight.step, self.config)
                    continue
                # Workers are processes of their own: what they are told and what they say is copied.
                sent = pickle.dumps(flight.step)
                outputs = [pickle.dumps(runner.run(pickle.loads(sent), self.config)) for runner in self.runners]
                flight.output = self.aggregator.aggregate([pickle.loads(output) for output in outputs])

    def _receive(self, outputs: dict[int, Any]) -> None:
        for one in outputs.values():
            for output in one.outputs:
                client = self.clients[output.request_id]
                client.tokens += output.new_token_ids
                if output.finish_reason is not None:
                    client.ended = str(output.finish_reason)

    def _abort(self) -> None:
        for name, request in list(self.scheduler.requests.items()):
            client = self.clients[name]
            if client.plan.abort is None or client.ended is not None:
                continue
            state, ticks = client.plan.abort
            client.ticks_in_state += self._is_in(request, state)
            if client.ticks_in_state > ticks:
                client.ended = "aborted by its client"
                self.history.append(f"tick {self.ticks}: abort {name} ({request.status.name})")
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _is_in(self, request: Any, state: str) -> bool:
        status = request.status
        if state == "saving":
            return status == RequestStatus.RUNNING and self.connector.has_pending_push_work()
        names = {
            "queued": RequestStatus.WAITING,
            "loading": RequestStatus.WAITING_FOR_REMOTE_KVS,
            "running": RequestStatus.RUNNING,
            "preempted": RequestStatus.PREEMPTED,
        }
        return bool(status == names[state])

    def _do_wanted(self) -> None:
        """New weights, or sleep, as soon as vLLM would go on with it."""
        if self.wanted == "sleep":
            if self.scheduler.has_requests() or not self.scheduler.reset_prefix_cache():
                return
            for runner in self.runners:
                runner.connector.unregister_kv_caches()
                runner.forget()
                runner.connector.restore_kv_caches()
        else:
            # What is loaded holds blocks until it runs, so nothing can be reset while everything stands still.
            self.scheduler.set_pause_state(PauseState.PAUSED_NEW if self.ticks % 64 < 32 else PauseState.UNPAUSED)
            try:
                done = self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            except RuntimeError:
                return  # blocks are pinned or being loaded: vLLM's callers try again
            if not done:
                return
            self.scheduler.set_pause_state(PauseState.UNPAUSED)
            self.updates += 1
            self.history.append(f"tick {self.ticks}: new weights")
            for runner in self.runners:
                runner.weights = f"weights of {self.number} after {self.updates} updates, {self.seed}"
        self.wanted = None
