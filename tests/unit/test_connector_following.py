"""Loads that vLLM goes on with before they are over: every layer reads the bytes that were saved, whatever happens."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from pegaflow.connector import following
from pegaflow.connector.copies import Copies, NativeTypes
from pegaflow.connector.following import Follower, stage_ends
from pegaflow.connector.guard import Guard, MustStop
from pegaflow.errors import DeviceError
from pegaflow.metrics import Recorder
from tests.fakes import FakeCopier, FakeDone, FakeLayout, FakePool
from tests.unit.mini_engine import PART_BYTES, SINGLE, MiniEngine

PROMPT = list(range(100, 140))
LAYERS = 4
TAILS = {"pd_tail_save": True, "pd_tail_load": True}


class StagedCopier(FakeCopier):
    """A device whose copies arrive stage by stage, no sooner than somebody has to see them."""

    def __init__(self, pool: FakePool) -> None:
        super().__init__(pool)
        self.ends: dict[int, list[int]] = {}
        self.told: list[int] = []
        self.arrived: dict[int, int] = {}
        self.late = False
        """Whether loads stay under way until a stream waits for them."""
        self.broken: Exception | None = None
        self.waits: list[tuple[int, int]] = []

    def load(
        self,
        part: int,
        layout: FakeLayout,
        refs: Sequence[int],
        block_ids: Sequence[int],
        stage_ends: Sequence[int] | None = None,
    ) -> int:
        job = super().load(part, layout, refs, block_ids)
        if stage_ends is not None:
            self.ends[job], self.arrived[job] = list(stage_ends), 0
            self.told.append(job)
        return job

    def take_queued(self) -> list[int]:
        told, self.told = [job for job in self.told if job in self.queued], []
        return told

    def stream(self) -> int:
        return 7

    def wait_stage(self, copy: int, stage: int, stream: int) -> None:
        if self.broken is not None:
            raise self.broken
        self.waits.append((copy, stage))
        if copy in self.queued:
            self._arrive(copy, stage + 1)

    def poll(self) -> list[FakeDone]:
        late = {job: what for job, what in self.queued.items() if self.late and job in self.ends}
        late = {job: what for job, what in late.items() if self.arrived[job] < len(self.ends[job])}
        self.queued = {job: what for job, what in self.queued.items() if job not in late}
        done = super().poll()
        self.queued.update(late)
        return done

    def wait(self, timeout_ms: int) -> list[FakeDone]:
        self.late = False
        return self.poll()

    def arrive_all(self) -> None:
        """The device catches up."""
        for job in self.ends:
            if job in self.queued:
                self._arrive(job, len(self.ends[job]))

    def _arrive(self, job: int, stages: int) -> None:
        _, part, layout, refs, block_ids = self.queued[job]
        start = self.ends[job][self.arrived[job] - 1] if self.arrived[job] else 0
        self.arrived[job] = max(self.arrived[job], stages)
        end = self.ends[job][self.arrived[job] - 1]
        for ref, block in zip(refs, block_ids, strict=True):
            assert self.pool.leases[ref], "copied from a slot that nobody leases"
            content = layout.read(block)
            layout.write(block, content[:start] + self.pool.slots[ref].parts[part][start:end] + content[end:])


@pytest.fixture(autouse=True)
def small_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of tests are small."""
    monkeypatch.setattr(following, "STAGE_BYTES_MIN", PART_BYTES // LAYERS)
    monkeypatch.setattr(following, "STAGE_BYTES_AIM", PART_BYTES // LAYERS)


def staged_engine(**options: Any) -> tuple[MiniEngine, list[StagedCopier]]:
    pool = FakePool()
    copiers: list[StagedCopier] = []

    def copier(opened: Any, device: str) -> StagedCopier:
        copiers.append(StagedCopier(opened))
        return copiers[-1]

    native: Any = NativeTypes(lambda name, shm_dir: pool, copier, FakeLayout)  # type: ignore[arg-type]
    return MiniEngine(SINGLE, pool, native=native, layers=LAYERS, **options), copiers


def warm(engine: MiniEngine, prompt: list[int] = PROMPT) -> None:
    engine.add(prompt)
    engine.run()


def step_until(engine: MiniEngine, condition: Any) -> None:
    for _ in range(20):
        if condition():
            return
        engine.step()
    raise AssertionError("it never came to that")


@pytest.mark.parametrize("ranks", [1, 2])
def test_request_runs_while_its_load_is_under_way_and_reads_the_right_bytes(ranks: int) -> None:
    engine, copiers = staged_engine(ranks=ranks)
    warm(engine)
    for copier in copiers:
        copier.late = True
    request = engine.add(PROMPT)
    step_until(engine, lambda: request.state == "running")
    assert all(copier.in_flight() == 1 for copier in copiers)
    assert engine.pool.leased() > 0
    engine.run()
    assert request.hit_tokens == len(PROMPT)
    assert [stage for _, stage in copiers[0].waits] == list(range(LAYERS))
    assert engine.recorder.counters["load_followed"] == 1
    engine.assert_nothing_held()


def test_first_request_of_a_process_waits_since_nobody_knows_yet_which_layers_vllm_names() -> None:
    engine, _ = staged_engine()
    warm(engine)
    fresh, copiers = staged_engine()
    fresh.pool.slots.update(engine.pool.slots)
    for slot in fresh.pool.slots.values():
        slot.namespace.pool = fresh.pool
    fresh.pool._namespaces.update(engine.pool._namespaces)
    request = fresh.add(PROMPT)
    fresh.run()
    assert request.hit_tokens == len(PROMPT)
    assert copiers[0].ends == {}


def test_layer_that_vllm_never_names_is_never_relied_on() -> None:
    follower = Follower([("a", 48), ("b", 96)])
    assert (follower.ready, follower.listens) == (False, True)
    follower.layer("a", None)
    assert not follower.ready
    follower.layer("b", None)
    assert (follower.ready, follower.listens) == (True, False)


def test_layer_without_a_name_is_not_listened_for_for_ever() -> None:
    follower = Follower([("a", 48), ("nameless", 72), ("b", 96)])
    for _ in range(1 + following.PASSES_MAX):
        assert follower.listens
        follower.layer("a", None)
        follower.layer("b", None)
    assert (follower.ready, follower.listens) == (False, False)
    follower.open(1)
    assert follower.listens


def test_layer_that_is_named_late_is_waited_for() -> None:
    follower = Follower([("a", 48), ("late", 96)])
    for _ in range(following.PASSES_MAX):
        follower.layer("a", None)
    assert follower.listens
    follower.layer("late", None)
    assert (follower.ready, follower.listens) == (True, False)


def test_layers_that_were_named_while_graphs_were_captured_do_not_count() -> None:
    follower = Follower([("a", 48), ("b", 96)])
    follower.layer("a", None)
    follower.layer("b", None)
    follower.forget()
    assert (follower.ready, follower.listens) == (False, True)
    follower.layer("a", None)
    follower.layer("b", None)
    assert follower.ready


def test_stages_end_with_layers_and_with_the_block() -> None:
    least = following.STAGE_BYTES_MIN
    assert stage_ends([least // 2, least]) == ()
    assert stage_ends([least * layer for layer in (1, 2, 3, 4)]) == tuple(least * stage for stage in (1, 2, 3, 4))
    assert len(stage_ends([least * layer for layer in range(1, 101)])) == following.STAGES_MAX
    assert stage_ends([10, 20, least * 3]) == (20, least * 3)
    assert stage_ends([least * 3]) == ()
    assert stage_ends([10, least * 2, least * 3, least * 3]) == (least * 2, least * 3)


def test_step_that_names_no_layers_waits_for_everything_first() -> None:
    engine, copiers = staged_engine()
    warm(engine)
    copiers[0].late = True
    request = engine.add(PROMPT)
    step_until(engine, lambda: request.state == "running")
    engine.unasked = True
    engine.run()
    assert request.hit_tokens == len(PROMPT)
    assert [stage for _, stage in copiers[0].waits] == [LAYERS - 1]
    engine.assert_nothing_held()


def test_request_that_comes_while_a_load_lands_never_meets_half_a_block() -> None:
    engine, copiers = staged_engine()
    warm(engine)
    copiers[0].late = True
    first = engine.add(PROMPT, more=3)
    step_until(engine, lambda: first.state == "running")
    second = engine.add(list(range(500, 520)))
    engine.run()
    assert (first.hit_tokens, second.num_tokens) == (len(PROMPT), 21)
    engine.assert_nothing_held()


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_load_beside_others_is_followed_only_if_that_is_asked_for(mode: str) -> None:
    engine, copiers = staged_engine(layerwise=mode)
    warm(engine)
    other = engine.add(list(range(500, 520)), more=30)
    step_until(engine, lambda: other.state == "running")
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == len(PROMPT)
    assert bool(copiers[0].ends) == (mode == "on")
    engine.assert_nothing_held()


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_load_that_ends_with_a_tail_is_complete_before_the_request_runs(mode: str) -> None:
    engine, copiers = staged_engine(layerwise=mode, **TAILS)
    warm(engine)
    warm(engine, PROMPT[:-2])
    copiers[0].ends.clear()
    copiers[0].late = True
    request = engine.add(PROMPT[:-2], more=9)
    engine.run()
    assert request.hit_tokens == len(PROMPT) - 2
    assert copiers[0].ends == {}
    engine.assert_nothing_held()


@pytest.mark.parametrize("event", ["abort", "preempt"])
def test_blocks_of_a_request_that_is_gone_stay_untouched_until_its_load_is_over(event: str) -> None:
    engine, copiers = staged_engine(blocks=14)
    warm(engine)
    copiers[0].late = True
    request = engine.add(PROMPT)
    step_until(engine, lambda: request.state == "running")
    blocks = list(request.tables[0])
    if event == "abort":
        engine.abort(request)
    else:
        engine.preempt(request)
    assert all(engine.block_pool.blocks[block].ref_cnt == 1 for block in blocks[:10])
    free = [block for block in iter(engine.block_pool.allocate, None) if block]
    assert free
    assert not set(free) & set(blocks[:10])
    engine.block_pool.free_blocks([engine.block_pool.blocks[block] for block in free])
    copiers[0].arrive_all()
    engine.run()
    engine.assert_nothing_held()


@pytest.mark.parametrize("event", ["abort", "preempt", "none"])
def test_engine_stops_when_a_load_fails_that_vllm_went_on_with(event: str) -> None:
    engine, copiers = staged_engine()
    warm(engine)
    copiers[0].late = True
    request = engine.add(PROMPT, more=5)
    step_until(engine, lambda: request.state == "running")
    if event == "abort":
        engine.abort(request)
    elif event == "preempt":
        engine.preempt(request)
    said = request.num_tokens
    copiers[0].failing_loads = {3}
    copiers[0].arrive_all()
    with pytest.raises(MustStop, match="start it again"):
        engine.run()
    assert request.num_tokens == said
    assert engine.workers[0].take_invalid_blocks() == set(), "nothing that vLLM could go on with"


def test_load_that_fails_as_soon_as_all_was_handed_over_is_an_ordinary_failure() -> None:
    engine, copiers = staged_engine()
    warm(engine)
    copiers[0].failing_loads = {3}
    request = engine.add(PROMPT, more=5)
    engine.run()
    assert copiers[0].ends, "it was to be followed"
    assert (request.hit_tokens, engine.recorder.counters["load_failure"]) == (12, 1)
    engine.assert_nothing_held()


def test_engine_stops_when_a_load_that_nobody_can_wait_for_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, copiers = staged_engine()
    warm(engine)
    copiers[0].late, copiers[0].broken = True, DeviceError("no")
    request = engine.add(PROMPT)
    step_until(engine, lambda: request.state == "running" or not engine.requests)
    monkeypatch.setattr(Copies, "drain", lambda self, seconds_max: False)
    with pytest.raises(MustStop):
        engine.run()


def test_error_that_ends_the_engine_is_the_only_one_that_vllm_hears_of() -> None:
    def stop() -> None:
        raise MustStop("it has to")

    def stumble() -> None:
        raise ValueError("it need not")

    guard = Guard(Recorder(), lambda reason: None)
    assert guard.run("a hook", None, stumble) is None
    with pytest.raises(MustStop):
        guard.run("a hook", None, stop)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("event", ["abort", "none"])
def test_what_was_computed_behind_a_load_is_published_once_the_load_is_known_to_be_good(
    event: str, fails: bool
) -> None:
    engine, copiers = staged_engine(ranks=2)
    warm(engine)
    known = set(engine.pool.slots)
    for copier in copiers:
        copier.late = True
    request = engine.add(PROMPT, more=9)
    step_until(engine, lambda: request.state == "running")
    held = copiers[1]
    original, held.poll = (
        held.poll,
        lambda: [done for done in original() if done.job not in held.ends or late.append(done)],
    )
    late: list[FakeDone] = []
    for _ in range(6):
        engine.step()
    if event == "abort" and request.request_id in engine.requests:
        engine.abort(request)
    for _ in range(3):
        engine.step()
    assert late, "the load has ended on the device"
    new = [slot for ref, slot in engine.pool.slots.items() if ref not in known]
    assert new
    assert all(slot.state == "reserved" and len(slot.parts) == 2 for slot in new), "copied, but not for anybody to see"
    held.poll = lambda: [FakeDone(done.job, not fails, [3] if fails else []) for done in late] + original()
    with pytest.raises(MustStop) if fails else nullcontext():
        engine.step()
        held.poll = original
        engine.run()
        engine.assert_nothing_held()
    engine.scheduler.shutdown()
    published = [slot for ref, slot in engine.pool.slots.items() if ref not in known and slot.state == "sealed"]
    assert bool(published) is not fails


def test_load_that_fails_before_vllm_goes_on_is_recomputed() -> None:
    engine, copiers = staged_engine(layerwise="off")
    warm(engine)
    copiers[0].failing_loads = {3}
    engine.add(PROMPT)
    engine.run()
    assert engine.recorder.counters["load_failure"] == 1


def test_engine_that_nobody_steps_when_idle_holds_no_blocks_for_a_load() -> None:
    engine, copiers = staged_engine(settle=True)
    warm(engine)
    copiers[0].late = True
    request = engine.add(PROMPT)
    while engine.requests:
        engine.step()
    assert request.hit_tokens == len(PROMPT)
    assert engine.block_pool.used() == 0


def test_driver_that_refuses_to_wait_costs_time_and_no_wrong_byte() -> None:
    engine, copiers = staged_engine()
    warm(engine)
    copiers[0].late, copiers[0].broken = True, DeviceError("no")
    request = engine.add(PROMPT)
    engine.run()
    assert request.hit_tokens == len(PROMPT)
    assert engine.recorder.counters.pop("hook_errors") >= 1
    engine.assert_nothing_held()


def test_reset_is_asked_for_again_while_a_load_lands() -> None:
    engine, copiers = staged_engine()
    warm(engine)
    copiers[0].late = True
    request = engine.add(PROMPT)
    step_until(engine, lambda: request.state == "running")
    assert not engine.scheduler.reset()
    engine.run()
    assert engine.scheduler.reset()


@pytest.mark.parametrize("seed", range(30))
def test_random_traffic_reads_what_was_saved(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.choice((1, 2))
    engine, copiers = staged_engine(ranks=ranks, blocks=40, layerwise=draw.choice(("auto", "on")), **TAILS)
    prompts = [[number * 1000 + token for token in range(draw.randrange(8, 50))] for number in range(4)]
    followed = 0
    for _ in range(120):
        for copier in copiers:
            copier.late = draw.random() < 0.7
            if draw.random() < 0.2:
                copier.arrive_all()
        engine.unasked = draw.random() < 0.1
        if draw.random() < 0.3 and len(engine.requests) < 4:
            engine.add(draw.choice(prompts), more=draw.randrange(1, 5))
        if engine.requests and draw.random() < 0.1:
            engine.abort(
                draw.choice([r for r in engine.requests.values() if r.state != "aborted"] or [engine.add([1])])
            )
        running = [r for r in engine.requests.values() if r.state == "running"]
        if running and draw.random() < 0.1:
            engine.preempt(draw.choice(running))
        engine.step()
        followed += any(job.follow for job in engine.plans[-1].loads)
    for copier in copiers:
        copier.late = False
    engine.run()
    assert followed
    engine.assert_nothing_held()
