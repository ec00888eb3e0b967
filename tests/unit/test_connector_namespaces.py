"""When namespaces come to be, and why sometimes they do not."""

from typing import Any

import pytest

from pegaflow.connector.geometry import Geometry, Group, GroupKind
from pegaflow.connector.metadata import GroupShape, WorkerShape
from pegaflow.connector.namespaces import Store
from pegaflow.errors import PoolBusy, PoolFull
from tests.fakes import FakeIdentity, FakePool
from tests.patience import await_
from tests.unit.mini_engine import HYBRID, SINGLE


def shape(rank: tuple[int, int], *sizes: int, **fields: Any) -> WorkerShape:
    return WorkerShape(rank, fields.pop("host", "h"), tuple(GroupShape(size, f"d{size}") for size in sizes), **fields)


def store(geometry: Geometry = SINGLE, ranks: int = 1, replicas: int = 1, pool: Any = None) -> Store:
    return Store(pool or FakePool(), geometry, FakeIdentity(), ranks, replicas)


def test_every_rank_has_a_part_in_order() -> None:
    made = store(ranks=4)
    made.set_shapes({(p, t): shape((p, t), 10 + 2 * p + t) for p in (1, 0) for t in (1, 0)})
    spaces = made.namespaces()
    assert spaces is not None
    assert spaces[0].part_bytes == [10, 11, 12, 13]
    address = made.address()
    assert address is not None
    assert address.parts == {(0, 0): (0,), (0, 1): (1,), (1, 0): (2,), (1, 1): (3,)}


def test_rank_without_layers_of_a_group_has_no_part_in_it() -> None:
    made = store(Geometry(HYBRID.groups[:2]), ranks=2)
    made.set_shapes({(0, 0): shape((0, 0), 10, 0), (1, 0): shape((1, 0), 0, 20)})
    spaces = made.namespaces()
    assert spaces is not None
    assert [space.part_bytes for space in spaces.values()] == [[10], [20]]
    address = made.address()
    assert address is not None
    assert address.parts == {(0, 0): (0, None), (1, 0): (None, 0)}


def test_replicas_share_a_part_and_one_of_them_saves() -> None:
    made = store(ranks=4, replicas=2)
    made.set_shapes({(0, t): shape((0, t), 10) for t in range(4)})
    spaces, address = made.namespaces(), made.address()
    assert spaces is not None
    assert address is not None
    assert spaces[0].part_bytes == [10, 10]
    assert [address.parts[0, t] for t in range(4)] == [(0,), (0,), (1,), (1,)]
    assert address.savers == {(0, 0), (0, 2)}


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ([shape((0, 0), 10)], "only 1 of 2 workers"),
        ([shape((0, 0), 10), shape((0, 1), 10, host="other")], "several hosts"),
        ([shape((0, 0), 10), shape((0, 1), 10, problem="no memory.")], "no memory"),
        ([shape((0, 0), 10), shape((0, 1), 20)], "different layouts"),
    ],
)
def test_workers_that_do_not_fit_turn_the_cache_off(shapes: list[WorkerShape], reason: str) -> None:
    made = store(ranks=2, replicas=2)
    made.set_shapes({item.rank: item for item in shapes})
    assert reason in (made.off or "")
    assert made.namespaces() is None
    assert not made.worth_waiting()


def test_unsupported_model_turns_the_cache_off() -> None:
    made = store(Geometry((Group(0, GroupKind.UNSUPPORTED, 4, 1, 0, "MambaSpec"),)))
    assert "MambaSpec" in (made.off or "")


def test_pool_that_refuses_a_namespace_turns_the_cache_off() -> None:
    class Full(FakePool):
        def namespace(self, *arguments: Any, **more: Any) -> Any:
            raise PoolFull("the namespace table is full.")

    made = store(pool=Full())
    made.set_shapes({(0, 0): shape((0, 0), 10)})
    assert made.namespaces() is None
    assert made.off == "the namespace table is full."


def test_busy_pool_is_asked_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Busy(FakePool):
        def namespace(self, *arguments: Any, **more: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise PoolBusy("a lock was not to be had: retry.")
            return super().namespace(*arguments, **more)

    made = store(pool=Busy())
    made.set_shapes({(0, 0): shape((0, 0), 10)})
    assert made.namespaces() is None
    assert made.namespaces() is None
    assert made.off is None
    assert len(calls) == 1
    made._retry_at = 0.0
    assert made.namespaces()


def test_same_shapes_again_keep_the_namespaces() -> None:
    made = store()
    made.set_shapes({(0, 0): shape((0, 0), 10)})
    first = made.namespaces()
    made.set_shapes({(0, 0): shape((0, 0), 10)})
    assert made.namespaces() is first


def test_other_layouts_lead_to_another_namespace() -> None:
    pool = FakePool()
    for size in (10, 20):
        made = store(pool=pool)
        made.set_shapes({(0, 0): shape((0, 0), size)})
        assert made.namespaces()
    assert len({id(space) for space in pool._namespaces.values()}) == 2


def test_background_makes_namespaces_before_the_first_request() -> None:
    made = store()
    made.prepare()
    made.set_shapes({(0, 0): shape((0, 0), 10)})
    await_(lambda: made.address() is not None)
    made.close()


def test_hashes_of_an_earlier_engine_are_not_taken_for_ours() -> None:
    class Changing(FakeIdentity):
        root = b"old"

        def factors(self) -> dict[str, Any]:
            return {"none_hash": self.root}

    identity = Changing()
    pool = FakePool()
    made = Store(pool, SINGLE, identity, 1, 1)  # type: ignore[arg-type]
    made.set_shapes({(0, 0): shape((0, 0), 10)})
    made._create()
    identity.root = b"new"
    made.namespaces()
    assert len(pool._namespaces) == 2


def test_closed_store_is_off_and_closes_the_pool_once() -> None:
    pool = FakePool()
    made = store(pool=pool)
    made.close()
    made.close()
    assert pool.closed
    assert made.namespaces() is None
