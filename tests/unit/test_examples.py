"""What the examples start, and with which arguments: each runs with stand-ins for the programs that it calls."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pegaflow.config import parse_config

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.sh"))
SECONDS_MAX = 240
STAND_IN = """#!{python}
import json, os, sys
seen = {{name: os.environ.get(name) for name in ("PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES", "PEGAFLOW_WEIGHT")}}
with open("{log}", "a") as log:
    log.write(json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], seen]) + "\\n")
# The first to be called goes on until the script ends it, the last one ends the script.
if sum(1 for _ in open("{log}")) < {programs}:
    sys.stdin.close()
    import signal
    signal.pause()
"""
PROGRAMS = {"single.sh": 1, "shared_pool.sh": 2, "prefill_decode.sh": 3}


def calls(script: str, folder: Path, **environment: str) -> list[tuple[str, list[str], dict[str, str | None]]]:
    """``(program, arguments, environment)`` of each program that an example starts, and the example has ended."""
    log = folder / "calls"
    for program in ("vllm", "vllm-router"):
        path = folder / program
        path.write_text(STAND_IN.format(python=sys.executable, log=log, programs=PROGRAMS[script]))
        path.chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "MODEL": "some/model", **environment}
    command = [str(EXAMPLES / script), "--max-model-len", "1024"]
    subprocess.run(command, env=environ, check=True, timeout=SECONDS_MAX, stdin=subprocess.DEVNULL)
    return sorted(tuple(json.loads(line)) for line in log.read_text().splitlines())


def option(arguments: list[str], name: str) -> str:
    """Value of an option that is given once."""
    assert arguments.count(name) == 1
    return arguments[arguments.index(name) + 1]


def test_all_examples_are_tried() -> None:
    assert set(SCRIPTS) == set(PROGRAMS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_instances_get_a_configuration_that_pegaflow_accepts(script: str, tmp_path: Path) -> None:
    instances = [call for call in calls(script, tmp_path) if call[0] == "vllm"]
    pools = []
    for _, arguments, environ in instances:
        assert arguments[:2] == ["serve", "some/model"]
        assert arguments[-2:] == ["--max-model-len", "1024"]
        assert environ["PYTHONHASHSEED"] == "0"
        transfer: dict[str, Any] = json.loads(option(arguments, "--kv-transfer-config"))
        assert transfer["kv_connector"] == "PegaKVConnector"
        assert transfer["kv_load_failure_policy"] == "recompute"
        pools.append(parse_config(transfer["kv_connector_extra_config"], {"PYTHONHASHSEED": "0"}).pool_name)
    assert set(pools) == {"default"}
    ports = [option(arguments, "--port") for _, arguments, _ in instances]
    assert len(set(ports)) == len(instances)


def test_prefill_saves_tails_and_decode_waits_for_them(tmp_path: Path) -> None:
    found = calls("prefill_decode.sh", tmp_path, GPUS="3 5")
    by_role = {}
    for program, arguments, environ in found:
        if program == "vllm":
            transfer = json.loads(option(arguments, "--kv-transfer-config"))
            config = parse_config(transfer["kv_connector_extra_config"], {"PYTHONHASHSEED": "0"})
            by_role[transfer["kv_role"]] = (config, option(arguments, "--port"), environ["CUDA_VISIBLE_DEVICES"])
    prefill, decode = by_role["kv_producer"], by_role["kv_consumer"]
    assert prefill[0].pd_tail_save
    assert decode[0].pd_tail_load
    assert decode[0].wait_for_full_prefix
    assert (prefill[2], decode[2]) == ("3", "5")
    router = next(arguments for program, arguments, _ in found if program == "vllm-router")
    assert option(router, "--prefill") == f"http://127.0.0.1:{prefill[1]}"
    assert option(router, "--decode") == f"http://127.0.0.1:{decode[1]}"


def test_instances_of_a_shared_pool_have_a_gpu_and_a_weight_each(tmp_path: Path) -> None:
    found = calls("shared_pool.sh", tmp_path, GPUS="0 1")
    assert sorted(environ["CUDA_VISIBLE_DEVICES"] or "" for _, _, environ in found) == ["0", "1"]
    assert {environ["PEGAFLOW_WEIGHT"] for _, _, environ in found} == {"1"}


def test_vllm_knows_all_of_their_options(tmp_path: Path) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    for script in SCRIPTS:
        folder = tmp_path / script
        folder.mkdir()
        for program, arguments, _ in calls(script, folder):
            if program == "vllm":
                parsed = parser.parse_args(arguments[1:])
                assert parsed.prefix_caching_hash_algo == "sha256_cbor"
                assert parsed.kv_transfer_config.kv_connector == "PegaKVConnector"


def test_readme_names_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert all(script in text for script in SCRIPTS)
