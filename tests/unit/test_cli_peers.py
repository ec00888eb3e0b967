"""``pegaflow peers`` over the loopback: who answers, how fast, and what is said when nobody does."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pegaflow import _native
from pegaflow.cli.main import cli
from pegaflow.errors import PegaFlowError
from pegaflow.p2p import probe
from pegaflow.shm.pool import list_pools
from tests.patience import await_
from tests.real_peers import TOKEN, free_address, served

SIZES = ("--size", "4mib", "--block-size", "64kib")


def invoke(*arguments: str, **environ: str | None) -> Result:
    values = {"PEGAFLOW_PEER_TOKEN": TOKEN, "PEGAFLOW_NICS": "none"} | environ
    return CliRunner().invoke(cli, ["peers", *arguments], env=values, catch_exceptions=False)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where pools of this host are."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """``(address, pool)`` of another host."""
    (tmp_path / "there").mkdir()
    pool = _native.Pool.open("there", shm_dir=str(tmp_path / "there"), pool_bytes=32 << 20, segment_bytes=4 << 20)
    with served(pool) as (address, _):
        yield address, pool
    pool.close()


def answer(
    place: Path,
    *arguments: str,
    exit_code: int = 0,
    holds: Callable[[Any], bool] = lambda peers: True,
    **environ: str | None,
) -> Any:
    """What a command says once it ends like this and ``holds`` of it: a busy host may be late with an answer."""
    found: Any = None

    def asked() -> bool:
        nonlocal found
        result = invoke(*arguments, "--shm-dir", str(place), "--json", **environ)
        assert list_pools(place) == [], "what was made for it is gone"
        assert TOKEN not in result.output + result.stderr
        found = (result.exit_code, json.loads(result.output))
        return result.exit_code == exit_code and holds(found[1]["peers"])

    await_(asked, lambda: found)
    return found[1]


@pytest.mark.parametrize("command", ["list", "ping", "bench", "fill"])
def test_help_has_examples_and_fits_80_columns(command: str) -> None:
    result = CliRunner().invoke(cli, ["peers", command, "--help"], terminal_width=80)
    assert result.exit_code == 0
    for part in ("Examples:", "--json", "--shm-dir", f"pegaflow peers {command}"):
        assert part in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_list_says_who_answers_and_who_does_not(place: Path, peer: tuple[str, Any]) -> None:
    nobody = free_address()
    first_is_up: Any = {"exit_code": 1, "holds": lambda peers: peers[0]["state"] == "up"}
    up, down = answer(place, "list", peer[0], nobody, **first_is_up)["peers"]
    assert (up["address"], up["state"], up["problem"]) == (peer[0], "up", None)
    assert up["rtt_us"] > 0
    assert (down["address"], down["state"]) == (nobody, "backing off")
    assert down["problem"]
    shown = invoke("list", peer[0], nobody, "--shm-dir", str(place))
    assert shown.exit_code == 1
    assert f"{nobody}: " in shown.output


def test_addresses_come_from_the_environment(place: Path, peer: tuple[str, Any]) -> None:
    assert answer(place, "list", PEGAFLOW_PEERS=peer[0])["peers"][0]["state"] == "up"
    result = invoke("list", PEGAFLOW_PEERS=None)
    assert result.exit_code == 2
    assert "PEGAFLOW_PEERS" in result.stderr


def test_token_comes_from_a_file_and_has_to_be_that_of_the_peer(place: Path, peer: tuple[str, Any]) -> None:
    token = place.parent / "token"
    token.write_text(f"{TOKEN}\n")
    one = answer(place, "list", peer[0], "--token-file", str(token), PEGAFLOW_PEER_TOKEN=None)["peers"][0]
    assert one["state"] == "up"
    token.write_text("another-token-than-theirs")
    one = answer(place, "list", peer[0], "--token-file", str(token), exit_code=1)["peers"][0]
    assert one["state"] == "backing off"
    result = invoke("list", peer[0], PEGAFLOW_PEER_TOKEN=None)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "peer_token_file" in result.stderr


def test_ping_measures_round_trips(place: Path, peer: tuple[str, Any]) -> None:
    (one,) = answer(place, "ping", peer[0], "--count", "30")["peers"]
    assert (one["answers"], one["lost"], one["problem"]) == (30, 0, None)
    assert 0 < one["least_us"] <= one["median_us"] <= one["most_us"]
    (lost,) = answer(place, "ping", free_address(), "--count", "3", exit_code=1)["peers"]
    assert (lost["answers"], lost["lost"], lost["median_us"]) == (0, 3, None)
    await_(lambda: "30" in invoke("ping", peer[0], "--count", "30", "--shm-dir", str(place)).output)


def test_bench_reads_what_fill_made(place: Path, peer: tuple[str, Any]) -> None:
    address, pool = peer
    empty: Any = {"exit_code": 1, "holds": lambda peers: "has 0 of 64 made-up blocks" in peers[0]["problem"]}
    answer(place, "bench", address, *SIZES, **empty)
    filled = invoke("fill", pool.path, *SIZES, "--json")
    assert (filled.exit_code, json.loads(filled.output)["blocks"]) == (0, 64)
    (after,) = answer(place, "bench", address, *SIZES)["peers"]
    assert (after["blocks"], after["block_bytes"], after["problem"]) == (64, 65536, None)
    assert after["transport"] == "tcp"
    assert after["bytes_per_second"] > 0
    await_(lambda: "64" in invoke("bench", address, *SIZES, "--shm-dir", str(place)).output)
    assert "Removed" in invoke("fill", pool.path, *SIZES, "--clear").output
    answer(place, "bench", address, *SIZES, **empty)


def test_pool_without_room_says_so(peer: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "FILL_SECONDS_MAX", 0.5)
    result = invoke("fill", peer[1].path, "--size", "64mib")
    assert result.exit_code == 1
    assert "room for" in result.stderr


@pytest.mark.parametrize(
    "arguments", [("bench", "h:1", "--size", "1kb"), ("bench", "h:1", "--block-size", "1kb", "--size", "1gb"), ("lst",)]
)
def test_wrong_usage_is_one_sentence(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def test_host_that_is_nowhere_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(address: Any) -> list[str]:
        raise OSError(2, "no such name")

    monkeypatch.setattr(probe, "resolve", fail)
    with pytest.raises(PegaFlowError, match=r"The host of kv:7441 cannot be looked up: no such name\."):
        probe.hosts_of(["kv:7441"])
    assert invoke("list", "kv:7441").exit_code == 1
