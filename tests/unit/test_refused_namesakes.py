"""Pools that are refused beside a living one of the same name: the commands in their refusals hit only them."""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pegaflow import _native
from pegaflow.cli.main import cli
from pegaflow.errors import PegaFlowError
from pegaflow.shm import inspect_pool, list_pools
from tests.unit.pool_processes import BLOCKS, keys, open_namespace, store

UID = os.geteuid()
NAMESAKES = {
    "an older layout": f"pegaflow-v1-{UID}-default",
    "a newer layout": f"pegaflow-v999-{UID}-default",
    "a newer layout, of another user": f"pegaflow-v999-{UID + 1}-default",
    "damaged, named for another user": f"pegaflow-v{_native.LAYOUT_VERSION}-{UID + 1}-default",
}


@pytest.fixture(params=["shm", "it's a $HOME"])
def shm(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    directory = tmp_path / str(request.param)
    directory.mkdir()
    return directory


@pytest.fixture
def living(shm: Path) -> Iterator[Any]:
    """Namespace of pool "default", which this process uses."""
    pool, namespace = open_namespace("default", str(shm))
    store(pool, namespace)
    yield namespace
    pool.close()


def make(shm: Path, kind: str) -> Path:
    """A pool of the same name that is refused."""
    directory = shm / NAMESAKES[kind]
    directory.mkdir(mode=0o700)
    control = directory / "control"
    control.write_bytes(b"nothing that could be used" * 1000)
    control.chmod(0o600)
    return directory


def refusals(shm: Path, path: Path) -> list[str]:
    """What is said of it by the list and by a look."""
    said = [one.error for one in list_pools(shm) if one.path == str(path)]
    try:
        inspect_pool(path)
    except PegaFlowError as error:
        said.append(str(error))
    return [text for text in said if text]


@pytest.mark.parametrize("kind", NAMESAKES)
def test_commands_that_a_refusal_names_remove_it_and_leave_a_living_namesake_alone(
    shm: Path, living: Any, kind: str
) -> None:
    path = make(shm, kind)
    said = refusals(shm, path)
    assert len(said) == 2
    for text in said:
        path.exists() or make(shm, kind)
        commands = re.findall("`pegaflow ([^`]+)`", text)
        assert commands, text
        for command in commands:
            done = CliRunner().invoke(cli, shlex.split(command), catch_exceptions=False)
            assert done.exit_code == 0, (command, done.stderr)
        assert not path.exists()
        assert [one.state for one in list_pools(shm)] == ["ok"]
        assert living.lookup(keys()) == BLOCKS


@pytest.mark.parametrize("options", [[], ["--force"]])
@pytest.mark.parametrize("kind", NAMESAKES)
def test_a_name_that_a_refused_pool_has_too_is_not_enough_to_remove_one(
    shm: Path, living: Any, kind: str, options: list[str]
) -> None:
    path = make(shm, kind)
    done = CliRunner().invoke(cli, ["rm", "default", *options, "--shm-dir", str(shm)], catch_exceptions=False)
    assert done.exit_code == 1
    assert all(one.path in done.stderr for one in list_pools(shm))
    assert path.exists()
    assert sorted(one.state for one in list_pools(shm)) == ["ok", "refused"]
