"""The backend through SGLang's own interface: made by its factory, with its host pools in all of their layouts."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageExtraInfo

from pegaflow import _native
from pegaflow.errors import InvalidArgument
from pegaflow.shm import find_pool, inspect_pool, open_pool, unlink_pool, verify_pool
from pegaflow.shm.traffic import sum_of
from tests.patience import WAIT_SECONDS_MAX
from tests.sglang.world import (
    KILLED,
    MHA_LAYOUTS,
    MIB,
    MLA_LAYOUTS,
    Setup,
    engine,
    fill,
    host_pool,
    in_child,
    indices,
    page_bytes,
    page_hashes,
    publish_model,
)

PAGES = 12
HASHES = page_hashes(PAGES)
READ_AT = [PAGES + page for page in reversed(range(PAGES))]
"""Where pages are read to: elsewhere, and in another order."""

CRASH_POINTS = (
    "reserve.keyed",
    "part.copied",
    "part.written",
    "publish.odd",
    "publish.sealed",
    "publish.unlocked",
)
"""Steps of storing a page, of which each may be a writer's last."""


@pytest.fixture
def setup(models: dict[str, Path], shm_dir: Path) -> Setup:
    """An engine of the first model with keys and values of two heads."""
    made = Setup(models["one"], shm_dir)
    publish_model(made)
    return made


def write(setup: Setup, pages: int = PAGES, seed: int = 0) -> list[bytes]:
    """Store pages by address. Returns what they held."""
    with engine(setup) as (storage, pool):
        assert isinstance(storage, HiCacheStorage)
        held = fill(pool, pages, seed)
        assert storage.batch_set_v1(HASHES[:pages], indices(pool, list(range(pages)))) == [True] * pages
        return held


def read(setup: Setup, hashes: list[str] = HASHES) -> tuple[int, list[bool], list[bytes]]:
    """``(pages that are said to be there, which came, what they hold)``, by address."""
    with engine(setup) as (storage, pool):
        at = READ_AT[: len(hashes)]
        there = storage.batch_exists(hashes)
        came = storage.batch_get_v1(hashes, indices(pool, at))
        return there, came, [page_bytes(pool, page) for page in at]


@pytest.mark.parametrize(
    ("latent", "layout"),
    [(False, layout) for layout in MHA_LAYOUTS] + [(True, layout) for layout in MLA_LAYOUTS],
)
def test_second_process_reads_the_same_bytes(setup: Setup, latent: bool, layout: str) -> None:
    setup = replace(setup, latent=latent, layout=layout)
    held = in_child(write, setup)
    assert len(set(held)) == PAGES
    assert in_child(read, setup) == (PAGES, [True] * PAGES, held)


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_pages_as_tensors_come_back_in_another_process(setup: Setup, layout: str) -> None:
    setup = replace(setup, layout=layout, by_address=False)

    def write_tensors() -> list[bytes]:
        with engine(setup) as (storage, pool):
            held = fill(pool, PAGES)
            assert storage.batch_set(HASHES, [pool.get_data_page(page * pool.page_size) for page in range(PAGES)])
            return held

    def read_tensors() -> tuple[int, bool, list[bytes]]:
        with engine(setup) as (storage, pool):
            targets = [pool.get_dummy_flat_data_page() for _ in HASHES]
            came = storage.batch_get(HASHES, targets)
            for page, one in enumerate(came):
                pool.set_from_flat_data_page(page * pool.page_size, one)
            one = storage.get(HASHES[0], pool.get_dummy_flat_data_page())
            same = one is not None and torch.equal(one.view(torch.uint8), targets[0].view(torch.uint8))
            return storage.batch_exists(HASHES), same, [page_bytes(pool, page) for page in range(PAGES)]

    held = in_child(write_tensors)
    assert in_child(read_tensors) == (PAGES, True, held)


def test_hits_are_the_run_before_the_first_missing_page(setup: Setup) -> None:
    in_child(write, setup, 5)

    def ask() -> tuple[int, list[bool], int, int, bool, bool]:
        with engine(setup) as (storage, pool):
            came = storage.batch_get_v1(HASHES, indices(pool, list(range(PAGES))))
            gap = [HASHES[0], HASHES[7], HASHES[1]]
            exists = storage.batch_exists(HASHES), came, storage.batch_exists(gap), storage.batch_exists([])
            return (*exists, storage.exists(HASHES[4]), storage.exists(HASHES[5]))

    there, came, before_gap, of_none, last, behind = in_child(ask)
    assert (there, came) == (5, [True] * 5 + [False] * (PAGES - 5))
    assert (before_gap, of_none, last, behind) == (1, 0, True, False)


def test_page_that_is_missing_leaves_its_memory_alone(setup: Setup) -> None:
    in_child(write, setup, 2)

    def ask() -> bool:
        with engine(setup) as (storage, pool):
            before = fill(pool, PAGES, seed=9)
            assert storage.batch_get_v1(HASHES[:4], indices(pool, [0, 1, 2, 3])) == [True, True, False, False]
            return [page_bytes(pool, page) for page in range(2, PAGES)] == before[2:]

    assert in_child(ask)


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "page_head"},
        {"dtype": torch.float16},
        {"page_tokens": 32},
        {"tensor_ranks": 2},
        {"tensor_rank": 1, "tensor_ranks": 2},
        {"latent": True},
        {"model": "other"},
        {"environment": ("SGLANG_USE_HND_KVCACHE", "1")},
    ],
    ids=lambda change: "-".join(change),
)
def test_whatever_changes_bytes_misses(
    setup: Setup, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    in_child(write, setup)
    change = dict(change)
    if "model" in change:
        change["model"] = models[change["model"]]
    for name, value in [change.pop("environment")] if "environment" in change else []:
        monkeypatch.setenv(name, value)
    there, came, _ = in_child(read, replace(setup, **change))
    assert (there, came) == (0, [False] * PAGES)
    monkeypatch.undo()
    assert in_child(read, setup)[0] == PAGES


def test_name_of_the_model_and_its_place_do_not_matter(setup: Setup, tmp_path: Path) -> None:
    held = in_child(write, setup)
    moved = tmp_path / "moved"
    moved.symlink_to(setup.model)
    assert in_child(read, replace(setup, model=moved)) == (PAGES, [True] * PAGES, held)


def test_each_rank_has_its_own_share_of_a_page(setup: Setup) -> None:
    ranks = [replace(setup, tensor_rank=rank, tensor_ranks=2) for rank in range(2)]
    held = [in_child(write, one, PAGES, seed) for seed, one in enumerate(ranks)]
    assert held[0] != held[1]
    for one, bytes_held in zip(ranks, held, strict=True):
        assert in_child(read, one) == (PAGES, [True] * PAGES, bytes_held)


def test_latent_pages_of_rank_0_are_those_of_all_ranks(setup: Setup) -> None:
    first = replace(setup, latent=True, tensor_ranks=2)
    held = in_child(write, first)
    assert in_child(read, replace(first, tensor_rank=1)) == (PAGES, [True] * PAGES, held)


def test_killed_writer_leaves_nothing_half_written(setup: Setup) -> None:
    def die(point: str) -> None:
        with engine(setup) as (storage, pool):
            fill(pool, PAGES)
            _native.crash_point_arm(point)
            storage.batch_set_v1(HASHES, indices(pool, list(range(PAGES))))

    for point in CRASH_POINTS:
        in_child(die, point, signalled=KILLED)
    there, came, bytes_read = in_child(read, setup)
    held = in_child(held_by, setup)
    assert came == [True] * there + [False] * (PAGES - there)
    assert bytes_read[:there] == held[:there]
    assert in_child(write, setup) == held
    assert in_child(read, setup) == (PAGES, [True] * PAGES, held)
    report = verify_pool(find_pool("default", setup.shm_dir).path)
    assert report.ok, report.problems


def held_by(setup: Setup) -> list[bytes]:
    """What ``write`` stores."""
    return fill(host_pool(setup), PAGES)


def test_clear_forgets_for_every_process(setup: Setup) -> None:
    in_child(write, setup)

    def clear() -> tuple[int, int]:
        with engine(setup) as (storage, _):
            before = storage.batch_exists(HASHES)
            storage.clear()
            return before, storage.batch_exists(HASHES)

    assert in_child(clear) == (PAGES, 0)
    assert in_child(read, setup)[0] == 0


def test_pages_are_stored_once_and_a_parent_may_be_named(setup: Setup) -> None:
    in_child(write, setup, 4)

    def write_again() -> list[bool]:
        with engine(setup) as (storage, pool):
            info = HiCacheStorageExtraInfo(prefix_keys=HASHES[:3])
            return storage.batch_set_v1(HASHES[3:], indices(pool, list(range(3, PAGES))), info)

    assert in_child(write_again) == [True] * (PAGES - 3)
    namespaces = inspect_pool(find_pool("default", setup.shm_dir).path).namespaces
    assert [one.blocks_sealed for one in namespaces] == [PAGES]
    assert namespaces[0].label == "tiny kv (tp 0)"


def test_full_pool_drops_old_pages_and_keeps_storing(setup: Setup) -> None:
    setup = replace(setup, pool_bytes=MIB)

    def churn() -> tuple[int, int]:
        with engine(setup) as (storage, pool):
            fill(pool, PAGES)
            stored = 0
            for turn in range(300):
                hashes = page_hashes(PAGES, salt=str(turn))
                stored += sum(storage.batch_set_v1(hashes, indices(pool, list(range(PAGES)))))
            return stored, storage.batch_exists(page_hashes(PAGES, salt="299"))

    stored, latest = in_child(churn)
    assert latest > 0
    assert stored > 0.9 * 300 * PAGES


def test_failures_are_misses_and_one_line_in_the_log(setup: Setup, shm_dir: Path) -> None:
    def refuse() -> list[Any]:
        import logging

        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("sglang.pegaflow").addHandler(handler)
        with engine(replace(setup, shm_dir=shm_dir / "nowhere")) as (storage, pool):
            answers: list[Any] = [storage.batch_exists(HASHES), storage.exists(HASHES[0])]
            answers += [any(storage.batch_set_v1(HASHES, indices(pool, list(range(PAGES)))))]
            answers += [any(storage.batch_get_v1(HASHES, indices(pool, list(range(PAGES)))))]
            answers += [storage.batch_get(HASHES, [None] * PAGES) == [None] * PAGES, storage.clear()]
        with engine(setup) as (storage, pool):
            for _ in range(3):
                answers += [any(storage.batch_set_v1(HASHES, indices(pool, [0])))]
            answers += [any(storage.batch_get_v1(HASHES, None)), storage.batch_set(HASHES, None)]
            answers += [storage.get(HASHES[0]), storage.set(HASHES[0], torch.zeros(1))]
        return [*answers, lines]

    *answers, lines = in_child(refuse)
    assert answers == [0, False, False, False, True, None, False, False, False, False, False, None, False]
    assert sum("nowhere" in line for line in lines) == 1, lines
    assert sum("a write failed" in line for line in lines) == 1, lines


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("pegaflow.pool_nam", "x", "pegaflow.pool_name"),
        ("pegaflow.mode", "save_only", "has no meaning with SGLang"),
        ("pegaflow.pool_size", "many", "not a size"),
    ],
)
def test_wrong_options_are_refused_at_the_start(setup: Setup, option: str, value: str, words: str) -> None:
    def start() -> str:
        try:
            with engine(replace(setup, options=((option, value),))):
                return "started"
        except InvalidArgument as error:
            return str(error)

    assert words in in_child(start)


def test_extra_config_is_what_sglang_reads_from_its_command_line(setup: Setup) -> None:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    written = json.dumps({**setup.extra_config, "prefetch_threshold": 64, "hicache_storage_pass_prefix_keys": True})
    parsed, threshold, *_ = HybridCacheController.parse_storage_backend_extra_config(written)
    assert (parsed, threshold) == (setup.extra_config, 64)


def test_transfers_are_reported_if_sglang_wants_to_know(setup: Setup) -> None:
    def report() -> tuple[list[int], list[int], bool, list[int], Any]:
        with engine(replace(setup, metrics=True)) as (storage, pool):
            fill(pool, PAGES)
            storage.batch_set_v1(HASHES, indices(pool, list(range(PAGES))))
            storage.batch_get_v1(HASHES[:5], indices(pool, list(range(5))))
            first, second = storage.get_stats(), storage.get_stats()
            positive = min(first.backup_bandwidth + first.prefetch_bandwidth) > 0
        with engine(setup) as (storage, _):
            return first.backup_pgs, first.prefetch_pgs, positive, second.backup_pgs, storage.get_stats()

    assert in_child(report) == ([PAGES], [5], True, [], None)


def test_pages_come_back_from_an_ssd_after_the_pool_was_removed(setup: Setup, tmp_path: Path) -> None:
    ssd = (("pegaflow.ssd_cache_path", str(tmp_path)), ("pegaflow.ssd_cache_capacity", "64mib"))
    setup = replace(setup, options=(*ssd, ("pegaflow.ssd_admission", "all"), ("pegaflow.prefetch_wait_ms_max", 60_000)))

    def write_through() -> list[bytes]:
        with engine(setup) as (storage, pool):
            held = fill(pool, PAGES)
            assert wait_until(lambda: serving(setup))
            assert all(storage.batch_set_v1(HASHES, indices(pool, list(range(PAGES)))))
            assert wait_until(lambda: spilled(setup) >= PAGES)
            return held

    def read_back() -> tuple[bool, list[bool], list[bytes]]:
        with engine(setup) as (storage, pool):
            there = wait_until(lambda: storage.batch_exists(HASHES) == PAGES)
            came: list[bool] = []

            def all_come() -> bool:  # at once, unless the tier's own threads get no processor for a while
                came[:] = storage.batch_get_v1(HASHES, indices(pool, READ_AT))
                return all(came)

            wait_until(all_come)
            return there, came, [page_bytes(pool, page) for page in READ_AT]

    held = in_child(write_through)
    unlink_pool(find_pool("default", setup.shm_dir).path)
    assert in_child(read_back) == (True, [True] * PAGES, held)


def serving(setup: Setup) -> bool:
    """Whether somebody reads and writes the pool's files on SSD."""
    with open_pool("default", shm_dir=setup.shm_dir) as pool:
        tier = pool.ssd()
        return tier is not None and tier["state"] == "serving"


def spilled(setup: Setup) -> int:
    """Pages that were written to SSD."""
    with open_pool("default", shm_dir=setup.shm_dir) as pool:
        tier = pool.ssd()
        return tier["spilled_blocks"] if tier is not None else 0


def wait_until(reached: Callable[[], bool]) -> bool:
    """Whether it came to that, on a machine however slow."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not (so := reached()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return so


def test_what_was_asked_found_and_moved_is_in_the_statistics_of_the_pool(setup: Setup) -> None:
    in_child(write, setup, 5)
    in_child(read, setup)
    traffic = inspect_pool(find_pool("default", setup.shm_dir).path).traffic
    assert traffic is not None
    counted = sum_of(traffic.namespaces)
    seen = {name: counted[name] for name in ("prompts", "blocks_asked", "hit_ram", "stored_blocks", "loaded_blocks")}
    assert seen == {"prompts": 1, "blocks_asked": PAGES, "hit_ram": 5, "stored_blocks": 5, "loaded_blocks": 5}
    assert counted["miss_never_stored"] == PAGES - 5
