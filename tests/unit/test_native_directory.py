"""The directory through the native module: real pools, a real server with passwords and TLS."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pegaflow import _native
from pegaflow.errors import InvalidArgument, PoolClosed
from pegaflow.keys import private
from pegaflow.p2p.probe import ask_directory
from tests.patience import await_
from tests.real_peers import free_port
from tests.unit.certificates import certificates
from tests.unit.native_pools import FINGERPRINT, keys, open_pool, reserve_all

ADDRESS = "10.0.0.1:7400"
BLOCK_BYTES = 4096

REGISTER_OVER_TLS = """
import sys, time
from pathlib import Path
from pegaflow import _native
from tests.unit.native_pools import open_pool

directory = _native.Directory(open_pool(Path(sys.argv[1])), sys.argv[2], address="10.0.0.1:7400")
wanted = sys.argv[3]
# A busy machine may be late with its first tries.
while not directory.facts()["owner"][wanted]:
    time.sleep(0.005)
print(directory.facts()["owner"]["up"], directory.facts()["owner"]["problem"])
"""


@pytest.fixture
def shm_dir(tmp_path: Path) -> Path:
    place = tmp_path / "shm"
    place.mkdir()
    return place


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def server(directory: Path, *options: str) -> Iterator[int]:
    """A private server; its port."""
    port = free_port()
    words = [word.replace("PORT", str(port)) for word in options or ("--port", "PORT")]
    program = shutil.which("redis-server")
    assert program, "the package redis-server is not installed"
    process = subprocess.Popen(
        [program, "--bind", "127.0.0.1", "--save", "", "--dir", str(directory), *words], stdout=subprocess.DEVNULL
    )
    try:
        await_(lambda: process.poll() is not None or answers(port))
        assert process.poll() is None, "somebody else took its port"
        yield port
    finally:
        process.kill()
        process.wait()


def fill(pool: _native.Pool, count: int, fingerprint: bytes = FINGERPRINT) -> _native.Namespace:
    namespace = pool.namespace(fingerprint, 0, [BLOCK_BYTES])
    refs = reserve_all(namespace, keys(count)[namespace.lookup(keys(count)) :])
    pool.mark_written(0, refs)
    assert pool.publish(refs) == len(refs)
    assert namespace.lookup(keys(count)) == count
    return namespace


def ask(directory: _native.Directory, namespace: _native.Namespace, wanted: list[bytes]) -> list[list[str]]:
    query = directory.find([(namespace, wanted), (namespace, [])])
    if query is None:
        return [[] for _ in wanted]
    await_(lambda: query.poll() is not None)
    answer = query.poll()
    assert answer is not None
    assert answer[1] == []
    return answer[0]


def test_blocks_of_a_real_pool_are_found_until_they_are_evicted_or_reset(shm_dir: Path, tmp_path: Path) -> None:
    with server(tmp_path) as port:
        url = f"redis://127.0.0.1:{port}/3"
        owner, asker = open_pool(shm_dir, name="owner"), open_pool(shm_dir, name="asker")
        own, namespace = fill(owner, 20), asker.namespace(FINGERPRINT, 0, [BLOCK_BYTES])
        registered = _native.Directory(owner, url, address=ADDRESS)
        directory = _native.Directory(asker, url)
        await_(lambda: ask(directory, namespace, keys(21)) == [[ADDRESS]] * 20 + [[]])

        def best() -> list[str] | None:
            query = directory.find([(namespace, keys(21))])
            if query is not None:
                await_(lambda: query.poll() is not None)
            return query and query.best(4)

        await_(lambda: best() == [ADDRESS])
        assert directory.facts()["owner"] is None
        assert directory.facts()["keys_named"] >= 20
        await_(lambda: registered.facts()["owner"]["complete"])
        await_(lambda: registered.facts()["owner"]["blocks"] == 20)
        other_group = asker.namespace(FINGERPRINT, 1, [BLOCK_BYTES])
        assert ask(directory, other_group, keys(20)) == [[]] * 20
        assert ask(registered, own, keys(20)) == [[]] * 20, "nobody is sent to himself"

        fingerprint = private(FINGERPRINT)
        fill(owner, 10, fingerprint)
        await_(lambda: registered.facts()["owner"]["complete"])
        hidden = asker.namespace(fingerprint, 0, [BLOCK_BYTES])
        fill(owner, 21)
        await_(lambda: ask(directory, namespace, keys(21)) == [[ADDRESS]] * 21)
        assert ask(directory, hidden, keys(10)) == [[]] * 10, "though they were there before"
        await_(lambda: registered.facts()["owner"]["blocks"] == 21)

        own.reset()
        await_(lambda: ask(directory, namespace, keys(20)) == [[]] * 20)
        fill(owner, 5)
        await_(lambda: ask(directory, namespace, keys(6)) == [[ADDRESS]] * 5 + [[]])
        registered.announce(None)
        await_(lambda: ask(directory, namespace, keys(5)) == [[]] * 5)
        for one in (registered, directory):
            one.close()
            one.close()
        with pytest.raises(PoolClosed):
            directory.find([(namespace, keys(1))])


def test_a_wrong_url_or_address_is_refused_and_a_wrong_password_is_a_sentence_without_it(
    shm_dir: Path, tmp_path: Path
) -> None:
    pool = open_pool(shm_dir)
    namespace = pool.namespace(FINGERPRINT, 0, [BLOCK_BYTES])
    with pytest.raises(InvalidArgument, match="write redis://"):
        _native.Directory(pool, "http://127.0.0.1")
    with server(tmp_path, "--port", "PORT", "--requirepass", "right") as port:
        with pytest.raises(InvalidArgument, match="give HOST:PORT"):
            _native.Directory(pool, f"redis://:right@127.0.0.1:{port}", address="nowhere")
        wrong = _native.Directory(pool, f"redis://:secret@127.0.0.1:{port}/0", address=ADDRESS)
        assert "secret" not in wrong.url
        await_(lambda: ask(wrong, namespace, keys(2)) == [[], []] and wrong.facts()["problem"] is not None)
        problem = wrong.facts()["problem"]
        assert problem
        assert "\n" not in problem
        assert "secret" not in problem
        await_(lambda: wrong.facts()["owner"]["problem"] is not None)
        assert "secret" not in wrong.facts()["owner"]["problem"]
        right = _native.Directory(pool, f"redis://:right@127.0.0.1:{port}", address=ADDRESS)
        await_(lambda: right.facts()["owner"]["complete"])
        for one in (wrong, right):
            one.close()


def test_a_look_at_a_store_says_whether_it_answers_and_writes_nothing(shm_dir: Path, tmp_path: Path) -> None:
    def size() -> str:
        words = ["redis-cli", "-a", "right", "--no-auth-warning", "-p", str(port), "dbsize"]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    with server(tmp_path, "--port", "PORT", "--requirepass", "right") as port:
        shown = f"redis://127.0.0.1:{port}/0"
        await_(lambda: ask_directory(f"redis://:right@127.0.0.1:{port}", str(shm_dir)) == (shown, None))
        assert size() == "0"
        wrong = f"redis://:hidden@127.0.0.1:{port}"
        of_a_wrong_password = ask_directory(wrong, str(shm_dir), seconds_max=0.5)
    of_a_server_that_is_gone = ask_directory(wrong, str(shm_dir), seconds_max=0.5)
    for of, problem in (of_a_wrong_password, of_a_server_that_is_gone):
        assert of == shown
        assert problem
        assert "hidden" not in problem
    with pytest.raises(InvalidArgument, match="write redis://"):
        ask_directory("redis://:hidden@one,two", str(shm_dir))
    assert list(shm_dir.iterdir()) == []


def test_over_tls_a_server_is_believed_only_with_a_certificate_of_a_known_authority(
    shm_dir: Path, tmp_path: Path
) -> None:
    authority, key, certificate = certificates(tmp_path)
    tls = ["--port", "0", "--tls-port", "PORT", "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    with server(tmp_path, *tls, "--tls-auth-clients", "no") as port:
        url = f"rediss://localhost:{port}"

        def said(authorities: Path, wanted: str) -> str:
            environment = {**os.environ, "SSL_CERT_FILE": str(authorities), "PYTHONPATH": os.pathsep.join(sys.path)}
            words = [sys.executable, "-c", REGISTER_OVER_TLS, str(shm_dir), url, wanted]
            return subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout.strip()

        assert said(authority, "up").startswith("True ")
        empty = tmp_path / "none.pem"
        empty.write_text("")
        assert "does not answer" in said(empty, "problem")
