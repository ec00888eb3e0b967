"""Options of peers: what is taken, what is refused, and that no secret is ever shown."""

from pathlib import Path
from typing import Any

import pytest

from pegaflow.config import ConnectorConfig, parse_config
from pegaflow.errors import InvalidArgument
from pegaflow.p2p import secrets

TOKEN = "0123456789abcdef-secret"
WITH_TOKEN = {"PEGAFLOW_PEER_TOKEN": TOKEN}


def parse(environ: dict[str, str] | None = None, **options: Any) -> ConnectorConfig:
    return parse_config({f"pegaflow.{name}": value for name, value in options.items()}, environ or {})


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Readable files by name."""
    for name in ("token", "cert", "key", "ca"):
        (tmp_path / name).write_text(f"{TOKEN}\n")
        (tmp_path / name).chmod(0o600)
    return {name: str(tmp_path / name) for name in ("token", "cert", "key", "ca")}


def test_peers_and_a_token_are_enough(files: dict[str, str]) -> None:
    config = parse(peers="10.0.0.2:7441,kv.example:7441", peer_listen="10.0.0.1:7441", peer_token_file=files["token"])
    assert config.peers == ("10.0.0.2:7441", "kv.example:7441")
    assert config.peer_listen == "10.0.0.1:7441"
    assert (config.peer_token, config.peer_tls, config.nics, config.qps_per_peer) == (TOKEN, None, None, 2)


def test_certificates_are_enough_too(files: dict[str, str]) -> None:
    tls = {"peer_tls_cert": files["cert"], "peer_tls_key": files["key"], "peer_tls_ca": files["ca"]}
    config = parse(peer_listen="10.0.0.1:7441", nics="none", qps_per_peer=4, **tls)
    assert config.peer_tls == (files["cert"], files["key"], files["ca"])
    assert (config.peers, config.peer_token, config.nics, config.qps_per_peer) == ((), None, (), 4)


def test_token_comes_from_the_environment_unless_there_is_a_file(files: dict[str, str]) -> None:
    other = {"PEGAFLOW_PEER_TOKEN": "x" * 16}
    assert parse(other, peers="h:1").peer_token == "x" * 16
    assert parse(other, peers="h:1", peer_token_file=files["token"]).peer_token == TOKEN
    assert parse({"PEGAFLOW_PEERS": "h:1", "PEGAFLOW_PEER_TOKEN_FILE": files["token"]}).peer_token == TOKEN


def test_token_in_the_environment_alone_means_nothing() -> None:
    assert parse(WITH_TOKEN) == ConnectorConfig()


def test_token_is_not_shown(files: dict[str, str]) -> None:
    for config in (parse(WITH_TOKEN, peers="h:1"), parse(peers="h:1", peer_token_file=files["token"])):
        assert config.peer_token == TOKEN
        assert "secret" not in repr(config)
        assert "secret" not in str(config)


def test_password_of_the_directory_is_not_shown() -> None:
    config = parse(WITH_TOKEN, directory="rediss+sentinel://user:hidden@10.0.0.8:26379,10.0.0.9:26379/master/0")
    assert config.directory is not None
    assert "hidden" not in repr(config)
    with pytest.raises(InvalidArgument, match="URL of a Redis") as error:
        parse(WITH_TOKEN, directory="http://user:hidden@10.0.0.9")
    assert "hidden" not in str(error.value)


@pytest.mark.parametrize("options", [{"peers": "h:1"}, {"peer_listen": "10.0.0.1:7441"}, {"directory": "redis://h"}])
def test_hosts_that_do_not_know_each_other_share_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"needs pegaflow\.peer_token_file, PEGAFLOW_PEER_TOKEN"):
        parse(**options)


@pytest.mark.parametrize("missing", ["peer_tls_cert", "peer_tls_key", "peer_tls_ca"])
def test_one_file_of_tls_is_not_enough(files: dict[str, str], missing: str) -> None:
    tls = {"peer_tls_cert": files["cert"], "peer_tls_key": files["key"], "peer_tls_ca": files["ca"]}
    del tls[missing]
    with pytest.raises(InvalidArgument, match="is not enough"):
        parse(WITH_TOKEN, peers="h:1", **tls)


@pytest.mark.parametrize("option", ["peer_token_file", "peer_tls_cert", "nics", "qps_per_peer"])
def test_option_without_peers_has_no_meaning(files: dict[str, str], option: str) -> None:
    value: Any = {"nics": "mlx5_0", "qps_per_peer": 2}.get(option, files["token"])
    with pytest.raises(InvalidArgument, match=rf"pegaflow\.{option} has no meaning"):
        parse(**{option: value})


@pytest.mark.parametrize(
    "content", ["", "short", "with a blank in it ", "x" * 513, "\u00e4" * 20, "tab\tin the token!", "\x7f" * 20]
)
def test_weak_or_odd_token_is_refused_and_not_quoted(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match="openssl rand") as error:
        parse(peers="h:1", peer_token_file=str(path))
    assert not content.strip() or content not in str(error.value)
    if content.isascii() and content:
        with pytest.raises(InvalidArgument, match="PEGAFLOW_PEER_TOKEN must hold") as error:
            parse({"PEGAFLOW_PEER_TOKEN": content}, peers="h:1")
        assert content not in str(error.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("peer_token_file", "relative"),
        ("peer_token_file", "/nowhere/at/all"),
        ("peer_tls_key", "/nowhere/at/all"),
        ("peer_tls_ca", 3),
        ("peer_listen", "0.0.0.0:7441"),
        ("peer_listen", "kv.example:7441"),
        ("peers", "10.0.0.2"),
        ("directory", "10.0.0.9:6379"),
        ("directory", 6379),
        ("nics", "mlx5_0,none"),
        ("qps_per_peer", 0),
        ("qps_per_peer", 17),
    ],
)
def test_wrong_value_is_refused_by_the_name_of_the_option(option: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=rf"^pegaflow\.{option} .*\.$"):
        parse(WITH_TOKEN, **{"peers": "h:1", option: value})


def test_file_that_others_may_read_is_told_from_one_that_they_may_not(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    for mode, shown in ((0o600, False), (0o640, True), (0o604, True), (0o400, False)):
        path.chmod(mode)
        assert secrets.open_to_others(str(path)) is shown
    assert not secrets.open_to_others(str(tmp_path / "nothing"))
