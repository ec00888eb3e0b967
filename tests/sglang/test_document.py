"""The command of the document, read by SGLang's own parsers and by ours."""

import argparse
import re
import shlex
from pathlib import Path

from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.server_args import ServerArgs

import pegaflow.sglang
from pegaflow.sglang.options import parse_options

DOCUMENT = Path(__file__).parents[2] / "docs" / "sglang.md"


def test_command_of_the_document_is_understood() -> None:
    (command,) = re.findall(r"^```\n(python -m sglang\.launch_server .*?)^```", DOCUMENT.read_text(), re.M | re.S)
    words = shlex.split(command.replace("\\\n", " "))
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(words[3:])
    assert given.enable_hierarchical_cache
    assert given.hicache_storage_backend == "dynamic"
    extra, *_, pass_prefix_keys = HybridCacheController.parse_storage_backend_extra_config(
        given.hicache_storage_backend_extra_config
    )
    assert pass_prefix_keys
    assert extra["module_path"] == pegaflow.sglang.__name__
    assert hasattr(pegaflow.sglang, extra["class_name"])
    assert extra["interface_v1"]
    assert parse_options(extra, {}).pool_bytes == 30 * 10**9
