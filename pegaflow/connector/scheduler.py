"""The scheduler's half: decides what to load and what to save. Never touches tensors and never waits.

It sees requests, hashes and block ids; it talks to the pool's index and to vLLM's block pool. What the workers have to
copy goes out in a ``StepPlan``, and what they copied comes back in a ``RankReport``.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from pegaflow.config import ConnectorConfig
from pegaflow.connector.adapters import Adapters
from pegaflow.connector.attribution import Attribution
from pegaflow.connector.events import EventMaker, Events
from pegaflow.connector.geometry import Geometry, GroupKind
from pegaflow.connector.guard import Guard
from pegaflow.connector.landing import Landings
from pegaflow.connector.loads import ASK_AGAIN, MISS, Answer, Loads
from pegaflow.connector.log import logger
from pegaflow.connector.metadata import PoolAddress, RankReport, SaveJob, StepPlan
from pegaflow.connector.namespaces import Store
from pegaflow.connector.peer_link import PeerLink
from pegaflow.connector.peer_report import PeerReport
from pegaflow.connector.peer_runs import PeerClient
from pegaflow.connector.peer_watch import PeerWatch
from pegaflow.connector.peering import PeerFetches
from pegaflow.connector.pins import Pins
from pegaflow.connector.prefetching import Prefetches
from pegaflow.connector.request_state import Phase, RequestState, RequestTable
from pegaflow.connector.saves import Saves
from pegaflow.connector.shard_asks import asks_of
from pegaflow.connector.speed import ComputeSpeed
from pegaflow.connector.ssd_report import SsdReport
from pegaflow.connector.tails import HashTokens, Tails
from pegaflow.connector.waiting import Waiting
from pegaflow.metrics import Recorder

IDLE_STEP_SECONDS = 0.001
"""How long a step that runs nothing leaves the interpreter to the threads that requests were put off for. An engine in
its caller's process goes round without a pause, and each system call of a thread then costs that thread 5 ms."""

NO_TAILS = (
    "pd_tail_save and pd_tail_load have no effect: they need a model whose layers all have full attention, without a "
    "drafter."
)

Scheduled = Iterable[tuple[RequestState, Callable[[RequestState], Sequence[Sequence[int]] | None], int]]
"""``(state, function of it for its block table by group, tokens computed after the step)`` of the requests in a step.
The tokens may include some that vLLM takes back."""


class SchedulerHalf:
    """All state of one engine on the scheduler's side."""

    def __init__(
        self,
        config: ConnectorConfig,
        geometry: Geometry,
        store: Store,
        recorder: Recorder,
        *,
        ranks: int,
        settle: bool = False,
        bypasses: Callable[[Any], bool] = lambda request: False,
        adapters: Adapters | None = None,
        names_layers: bool = False,
        wiped_by_first_pass: bool = False,
        hash_tokens: HashTokens | None = None,
        event_maker: EventMaker | None = None,
        link: PeerLink | None = None,
    ) -> None:
        """``ranks``: workers that report each job. ``settle``: see ``StepPlan.settle``. ``bypasses``: tells requests
        that must be left alone. ``adapters``: tells LoRA adapters apart. ``names_layers``: whether vLLM names each
        layer before it runs, so that forward passes can follow loads. ``wiped_by_first_pass``: see
        ``compat.wiped_by_first_pass``. ``hash_tokens``: vLLM's hash of the tokens of a tail. ``event_maker``:
        if somebody wants to know which blocks are in the pool. ``link``: to other hosts, if there may be any."""
        self.table = RequestTable()
        self._config = config
        self._geometry = geometry
        self._store = store
        self._recorder = recorder
        self._settle = settle
        self._bypasses = bypasses
        self._adapters = adapters or Adapters()
        self._wiped_later = wiped_by_first_pass
        self._closed = threading.Event()
        self._put_off = False
        """Whether a request was put off since the last step."""
        self._pins = Pins()
        self._bound = False
        self._last_plan = time.monotonic()
        self._announced: PoolAddress | None = None
        self._guard = Guard(recorder, store.turn_off)
        overdue_seconds = config.load_timeout_seconds
        # A load that lands while nobody steps would hold its blocks until somebody does, and vLLM could not sleep.
        plain = len(geometry.groups) == 1 and geometry.groups[0].kind is GroupKind.FULL and not geometry.drafts
        possible = names_layers and not settle and plain
        self._landings = Landings(self.table, self._pins, ranks, config.layerwise, possible)
        tails = Tails(geometry, hash_tokens, save=config.pd_tail_save, load=config.pd_tail_load)
        waiting = Waiting(geometry, tails, recorder, config.wait_for_full_prefix_seconds * config.wait_for_full_prefix)
        self._speed = ComputeSpeed()
        self._ssd_report = SsdReport()
        seconds_max = config.prefetch_wait_ms_max / 1_000
        prefetches = Prefetches(geometry, recorder, self._guard, self._speed, seconds_max)
        self._link = link
        self._peer_report = PeerReport()
        client = partial(_client, store, link)
        patient = config.wait_for_full_prefix
        fetches = PeerFetches(geometry, recorder, self._guard, self._speed, seconds_max, client, patient)
        watch = PeerWatch(client, self._guard)
        self._attribution = Attribution(geometry, recorder, self._guard)
        self._shards = asks_of(store.pool, geometry, ranks, recorder)
        self._loads = Loads(
            geometry, store, self.table, self._landings, recorder, overdue_seconds, tails, waiting, prefetches, fetches,
            watch, self._attribution, self._shards,
        )  # fmt: skip
        self._events = Events(event_maker, store.namespaces)
        landing, ask = self._landings.under, self._adapters.ask
        self._saves = Saves(
            geometry, store, self._pins, recorder, ranks, overdue_seconds, tails, self._events, landing, ask
        )
        self._report_start(tails)

    def bind_block_pool(self, block_pool: Any) -> None:
        """vLLM's block pool, in which blocks are pinned while they are being saved."""
        self._pins.bind(block_pool)
        self._bound = True

    def add_request(self, request: Any) -> None:
        """vLLM has taken a new request on."""
        self._state_of(request)

    def match(self, request: Any, computed_tokens: int, skips_reading: bool) -> Answer:
        """``(tokens beyond computed_tokens, asynchronous)``; ``(None, False)``: ask again in the next step."""
        answer = self._match(request, computed_tokens, skips_reading)
        self._put_off = self._put_off or answer == ASK_AGAIN
        return answer

    def _match(self, request: Any, computed_tokens: int, skips_reading: bool) -> Answer:
        state = self._state_of(request)
        if not self._config.reads or state.bypass or skips_reading or self._wiped_later:
            return MISS
        if self._store.off:
            self._loads.count_off(state, computed_tokens)
            return MISS
        if state.left_alone:
            # Asked last: what was not known may be known by now, and the next step finds it.
            waits = state.adapter is not None and state.adapter.worth_waiting
            return ASK_AGAIN if waits or not state.left_alone else MISS
        return self._loads.match(state, computed_tokens)

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """vLLM has allocated blocks; ``external_tokens`` of them are to be loaded, perhaps fewer than offered."""
        state = self._state_of(request)
        state.computed_seen = 0
        self._loads.allocated(state, self._select(tables) if external_tokens > 0 else (), external_tokens)

    def plan(
        self,
        scheduled: Callable[[], Scheduled],
        tokens: int,
        unasked: Callable[[Collection[str]], bool] = lambda request_ids: False,
    ) -> StepPlan:
        """What the workers have to do in this step of ``tokens`` tokens. Loads are never lost, whatever goes wrong with
        saves.

        ``unasked``: whether the step may read blocks without naming layers, given the requests that are landing."""
        runs_model = tokens > 0
        if self._put_off and not runs_model:
            self._closed.wait(IDLE_STEP_SECONDS)  # nothing is delayed: vLLM has nothing to do
        self._put_off = False
        self._speed.planned(tokens)
        self._wiped_later = self._wiped_later and not runs_model
        self._guard.run("looking at the SSD tier", None, self._look_at_ssd)
        if self._link is not None:
            self._guard.run("looking at peers", None, partial(self._peer_report.observe, self._link, self._recorder))
        self._guard.run("publishing saves", None, self._saves.complete_confirmed)
        if self._shards is not None:
            self._guard.run("letting go", None, self._shards.drop_old)
        loads = self._loads.take_jobs()
        saves = self._saves.take_late()
        self._loads.note_step(not (runs_model or self.table.loading or self.has_pending_saves()))
        if not self._was_idle():
            self._guard.run("watching copies", None, self._watch)
        if self._bound and not self._store.off:
            self._guard.run("planning saves", None, lambda: self._plan_saves(scheduled(), saves))
        whole = len(self._landings) > 0 and self._guard.run(
            "looking at a step", True, lambda: unasked(self._landings.request_ids)
        )
        orders = self._shards.pool.take_orders(loads, saves) if self._shards is not None else None
        if not loads and not saves and not orders and self._store.address() == self._announced:
            return StepPlan(runs_model=runs_model, unasked=whole)
        self._announced = self._store.address()
        return StepPlan(self._store.address(), loads, tuple(saves), runs_model, self._settle, whole, orders)

    def update(self, report: RankReport | None, received: Collection[str], invalid: Collection[int] = ()) -> None:
        """Take what the workers finished: ``report`` of some or all ranks, ``received``: loads that all ranks ended,
        ``invalid``: ids of blocks that this or another connector could not fill."""
        run = self._guard.run
        if invalid:
            run("giving up saves", None, partial(self._saves.distrust, invalid))
        if report is not None:
            if report.problem:
                self._store.turn_off(report.problem)
            if report.shapes:
                run("taking layouts", None, partial(self._store.add_shapes, report.shapes))
            for request_id, load in report.loads.items():
                was_landing = request_id in self._landings
                run("booking a load", None, partial(self._loads.reported, request_id, load))
                if was_landing and request_id not in self._landings:
                    run("ending a landing", None, partial(self._saves.load_over, request_id))
            if self._shards is not None and report.answers:
                spaces: Any = self._store.namespaces()
                for number, answer in report.answers.items():
                    run("taking an answer", None, partial(self._shards.answered, number, answer, spaces))
            for job_id, save in report.saves.items():
                run("publishing a save", None, partial(self._saves.reported, job_id, save))
        for request_id in received:
            run("ending a load", None, partial(self._loads.finished, request_id))

    def note_state(self) -> None:
        """Say at the end of a step how things are. If nothing is left to do, they stay so until the next request."""
        self._recorder.gauge("pending_save_requests", self._saves.pending)
        self._recorder.gauge("pinned_blocks", self._pins.count)
        if self._link is not None and not (len(self.table) or self.has_pending_saves()):
            self._peer_report.observe(self._link, self._recorder, at_rest=True)

    def finish_request(self, request: Any, tables: Sequence[Sequence[int]], sound: bool) -> None:
        """vLLM is done with a request and frees its blocks right after this.

        ``sound``: whether the blocks hold what the request computed; False for a request that ended in an error.
        """
        state = self.table.get(request.request_id)
        if state is None:
            return
        savable = state.phase is Phase.QUEUED and sound and state.may_load
        if savable and self._bound and not self._settle and not self._store.off:
            # Tokens that were still unconfirmed in the last step are final now. The last one was never computed.
            # What vLLM counts as computed may still be on its way from another connector, so it was in no step yet.
            computed_tokens = min(int(request.num_computed_tokens), int(request.num_tokens) - 1, state.computed_seen)
            tables = self._select(tables)
            late = partial(self._saves.plan_late, state, tables, computed_tokens)
            self._guard.run("saving the end of a request", None, late)
        self._loads.request_finished(request.request_id)

    def has_pending_saves(self) -> bool:
        """Whether vLLM has to keep stepping so that saves come to their end."""
        untold = self._shards is not None and self._shards.pool.has_orders
        return self._saves.pending > 0 or len(self._landings) > 0 or untold

    def frees_soon(self) -> bool:
        """Whether vLLM may wait a step for pinned blocks instead of preempting a request."""
        return self._saves.frees_soon()

    def take_events(self) -> list[Any]:
        """Which blocks have come to the pool and gone since the last call, as vLLM's events. vLLM asks at the end of
        each step, of those without tokens or news from workers too."""
        self._speed.ended()
        return self._events.take()

    def reset(self, pausing: bool = False) -> bool:
        """Forget everything cached for this model. False if that has to be asked for again: a load in flight may still
        bring old blocks back, or the pool's index could not be reached.

        ``pausing``: vLLM pauses or goes to sleep. Weights may be replaced next, so this engine finds nothing of before
        any more; others do. With ``keep_on_sleep`` weights stay, and so does everything.
        """
        idle = self.table.loading == 0 and not self._landings
        if pausing and self._config.keep_on_sleep:
            self._loads.stop_waiting()
            return idle
        for state in self.table:
            state.look_again()
            # Requests that are under way hold old blocks and would save them again.
            if int(getattr(state.request, "num_computed_tokens", 0)) > 0:
                state.bypass = True
        self._loads.void_offers()
        self._saves.forget_keys()
        self._events.forget_all()
        return self._store.reset(for_all=not pausing) and idle

    def shutdown(self) -> None:
        """Leave the pool. What is still being copied is never published. Idempotent."""
        self._guard.run("giving up saves", None, self._saves.abandon_all)
        self._guard.run("withdrawing offers", None, self._loads.withdraw_all)
        self._closed.set()
        self._adapters.close()
        self._ssd_report.close()
        if self._link is not None:
            self._guard.run("leaving peers", None, self._link.close)
        self._store.close()

    def _report_start(self, tails: Tails) -> None:
        config, pool = self._config, self._store.pool
        if pool is not None and config.ssd_directories:
            self._ssd_report.start(pool)
        if (config.pd_tail_save or config.pd_tail_load) and not tails.possible:
            logger.warning("PegaFlow: %s", NO_TAILS)

    def _state_of(self, request: Any) -> RequestState:
        known = self.table.get(request.request_id)
        if known is not None and known.request is request:
            return known
        state = self.table.ensure(request, self._bypasses(request))
        state.adapter = self._adapters.of(request.lora_request)
        return state

    def _select(self, tables: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Tables of the groups that take part."""
        return [tables[group.index] for group in self._geometry.groups]

    def _plan_saves(self, scheduled: Scheduled, saves: list[SaveJob]) -> None:
        for state, find_tables, tokens_after in scheduled:
            state.computed_seen = tokens_after
            if tokens_after < state.nothing_before and not state.snapshots:
                continue  # most of the requests in most steps, and there may be hundreds
            computed_tokens = min(tokens_after, int(state.request.num_tokens))
            if state.phase is not Phase.QUEUED or not self._saves.has_more(state, computed_tokens):
                continue
            tables = find_tables(state)
            select = self._select
            job = self._saves.plan(state, select(tables), computed_tokens, state.snapshots) if tables else None
            if job is not None:
                saves.append(job)

    def _was_idle(self) -> bool:
        """Whether nobody has stepped the engine for so long that copies may have ended long ago, unnoticed."""
        last, self._last_plan = self._last_plan, time.monotonic()
        return self._settle and self._last_plan - last > self._config.load_timeout_seconds / 2

    def _look_at_ssd(self) -> None:
        self._store.look_for_ssd()
        if self._store.pool is not None:
            self._ssd_report.observe(self._store.pool, self._recorder)
            self._attribution.observe(self._store.pool)

    def _watch(self) -> None:
        self._loads.watch()
        self._saves.watch()


def _client(store: Store, link: PeerLink | None) -> PeerClient | None:
    """Connections to other hosts, unless nobody else can have this engine's blocks."""
    return link.client if link is not None and store.shares else None


def log_notes(config: ConnectorConfig) -> None:
    """Say once what the configuration has to say."""
    for note in config.notes:
        logger.info("PegaFlow: %s", note)
