"""Options of the backend: those of the vLLM connector that have a meaning here, under the same names.

SGLang hands over the whole ``--hicache-storage-backend-extra-config``, its own keys included; ours begin with
``pegaflow.``. What is not there is looked up in the environment as ``PEGAFLOW_NAME``.
"""

from collections.abc import Mapping
from typing import Any

from pegaflow.config import PREFIX, ConnectorConfig, parse_config
from pegaflow.errors import InvalidArgument

NAMES = (
    "pool_name",
    "pool_size",
    "shm_dir",
    "segment_size",
    "use_hugepages",
    "hugepages_dir",
    "weight",
    "ssd_cache_path",
    "ssd_cache_capacity",
    "ssd_admission",
    "ssd_write_max",
    "ssd_write_inflight",
    "ssd_prefetch_inflight",
    "ssd_backend",
    "prefetch_wait_ms_max",
)
"""Options that SGLang may set, each ``pegaflow.NAME`` or ``PEGAFLOW_NAME``."""


def parse_options(extra: Mapping[str, Any] | None, environ: Mapping[str, str]) -> ConnectorConfig:
    """The configuration of ``extra`` (SGLang's extra config of the backend) and ``environ``.

    Raises ``InvalidArgument`` for an unknown ``pegaflow.`` option, one that has no meaning with SGLang, or a wrong
    value. Environment variables for other uses of PegaFlow are left alone.
    """
    ours = {key: value for key, value in (extra or {}).items() if key.startswith(PREFIX)}
    known = {f"PEGAFLOW_{name.upper()}" for name in (*NAMES, "instance_id")}
    config = parse_config(ours, {name: value for name, value in environ.items() if name in known})
    for key in ours:
        if key.removeprefix(PREFIX) not in NAMES:
            raise InvalidArgument(f"{key} has no meaning with SGLang: remove it.")
    return config
