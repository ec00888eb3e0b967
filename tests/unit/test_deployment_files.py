"""Files for Docker and Kubernetes parse, fit together and set options that exist; doctor checks what is said of it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from pegaflow.cli.doctor import examine
from pegaflow.cli.host import Host
from pegaflow.cli.main import cli
from pegaflow.config import ConnectorConfig, parse_config, parse_size

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
COMPOSE = ROOT / "examples" / "docker" / "compose.yaml"
CHECK = re.compile(r"^\| [^|]+ \| `([^`]+)` \|", re.MULTILINE)
OF_NO_PLACE = {"python", "pegaflow", "vllm", "numa", "peers"}
"""Checks of doctor that have nothing to do with how a container is started."""
IMAGE_ENTRYPOINT = ["vllm", "serve"]
"""Of vLLM's image."""
UNITS = {"Gi": 1 << 30, "Mi": 1 << 20}


def pod_of(manifest: Path) -> dict[str, Any]:
    """The pod's part of the one object in a file."""
    objects = list(yaml.safe_load_all(manifest.read_text()))
    assert len(objects) == 1
    spec: dict[str, Any] = objects[0]["spec"]
    return spec["template"]["spec"] if "template" in spec else spec


def containers_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """All containers of a pod."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def config_of(arguments: list[str], environ: dict[str, str]) -> ConnectorConfig:
    """PegaFlow's configuration of a command for vLLM."""
    transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "PegaKVConnector"
    assert transfer["kv_load_failure_policy"] == "recompute"
    return parse_config(transfer.get("kv_connector_extra_config", {}), environ)


def quantity(text: str) -> int:
    """Bytes of a size as Kubernetes writes it."""
    return int(text[:-2]) * UNITS[text[-2:]]


def below(path: str, directory: str) -> bool:
    """Whether a path is a directory or in it."""
    return path == directory or path.startswith(directory + "/")


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_pods_mount_what_they_have_and_only_that(manifest: Path) -> None:
    pod = pod_of(manifest)
    volumes = [volume["name"] for volume in pod["volumes"]]
    mounted = {mount["name"] for one in containers_of(pod) for mount in one["volumeMounts"]}
    assert len(set(volumes)) == len(volumes)
    assert mounted == set(volumes)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_pools_of_pods_fit_where_they_are(manifest: Path) -> None:
    pod = pod_of(manifest)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    vllm = next(one for one in pod["containers"] if one["name"] == "vllm")
    environ = {one["name"]: one["value"] for one in vllm["env"]}
    assert environ["PYTHONHASHSEED"] == "0"
    config = config_of(vllm["command"] + vllm["args"], environ)
    places = {mount["mountPath"]: volumes[mount["name"]] for mount in vllm["volumeMounts"]}
    limits = vllm["resources"]["limits"]
    assert config.pool_bytes is not None
    assert config.shm_dir in places
    if config.use_hugepages:
        assert config.hugepages_dir is not None
        assert places[config.hugepages_dir]["emptyDir"]["medium"] == "HugePages-2Mi"
        assert config.pool_bytes <= quantity(limits["hugepages-2Mi"])
    else:
        assert config.pool_bytes < quantity(limits["memory"])
        place = places[config.shm_dir]
        inside = place.get("emptyDir", {"medium": "Memory", "sizeLimit": "1000000Gi"})
        assert inside["medium"] == "Memory"
        assert config.pool_bytes < quantity(inside["sizeLimit"])
        assert "hostPath" not in place or below(place["hostPath"]["path"], "/dev/shm")
    assert all(any(below(one, place) for place in places) for one in config.ssd_directories)
    assert pod["securityContext"]["runAsUser"] == 1000


def services() -> dict[str, dict[str, Any]]:
    """Services of the file for Docker."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def programs() -> Iterator[tuple[str, list[str]]]:
    """What each container runs: where it is said, and the words. Docker puts ``command`` behind the entry point, of the
    image if the file names none; Kubernetes puts ``args`` behind ``command``."""
    for name, service in services().items():
        yield f"compose {name}", [*service.get("entrypoint", IMAGE_ENTRYPOINT), *service["command"]]
    for manifest in MANIFESTS:
        for container in containers_of(pod_of(manifest)):
            words = [*container.get("command", IMAGE_ENTRYPOINT), *container.get("args", [])]
            yield f"{manifest.stem} {container['name']}", words


@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, words in programs()])
def test_containers_run_commands_that_exist_with_arguments_that_they_take(words: list[str]) -> None:
    if words[0] == "vllm":
        assert words[1] == "serve"
        assert re.fullmatch(r"\w+/[\w.-]+", words[2]), "the model comes first"
        options = words[3:]
        assert all(option.startswith("--") for option in options[::2])
        assert not any(value.startswith("--") for value in options[1::2])
    elif words[0] == "pegaflow":
        command = cli.get_command(click.Context(cli), words[1])
        assert command is not None
        command.make_context(words[1], list(words[2:]))
    else:
        assert words[:2] == ["sh", "-c"]


def test_exporters_have_the_directory_and_the_user_of_the_engines() -> None:
    vllm, exporter = services()["vllm-0"], services()["exporter"]
    assert (exporter["user"], exporter["volumes"], exporter["image"]) == (vllm["user"], vllm["volumes"], vllm["image"])
    assert exporter["command"][exporter["command"].index("--shm-dir") + 1] == vllm["environment"]["PEGAFLOW_SHM_DIR"]
    engine, beside = pod_of(ROOT / "examples" / "kubernetes" / "one-pod.yaml")["containers"]
    assert (beside["volumeMounts"], beside["image"]) == (engine["volumeMounts"], engine["image"])
    assert "securityContext" not in engine
    assert "securityContext" not in beside


def test_services_share_one_directory_as_one_user() -> None:
    found = [service for name, service in services().items() if name.startswith("vllm")]
    assert len(found) == 2
    for service in found:
        config = config_of(service["command"], service["environment"])
        host_directory, _, place = service["volumes"][0].partition(":")
        assert (host_directory, place) == ("/dev/shm/pools", config.shm_dir)
        assert config.pool_bytes is not None
        assert config.pool_bytes < parse_size(service["mem_limit"] + "b")
    assert len({json.dumps([one["user"], one["volumes"], one["command"]]) for one in found}) == 1
    assert len({one["ports"][0] for one in found}) == 2


def test_everything_that_has_to_be_right_is_a_check_of_doctor() -> None:
    names = {finding.name for finding in examine(Host(), "/dev/shm")}
    table = (ROOT / "docs" / "deployment.md").read_text().split("\n## ", 1)[0]
    said = CHECK.findall(table)
    assert len(said) == len(set(said))
    assert set(said) == names - OF_NO_PLACE


def test_all_files_are_looked_at() -> None:
    found = {path for path in (ROOT / "examples").rglob("*") if path.suffix in (".yaml", ".yml")}
    assert found == {*MANIFESTS, COMPOSE}
    assert len(MANIFESTS) == 3
