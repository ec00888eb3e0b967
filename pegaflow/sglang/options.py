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
    "eviction_policy",
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


STEPS = "SGLang decides when pages are looked up, loaded and written"
GPU = "SGLang's own kernels copy between the GPU and its host pool"
PAGES = "SGLang stores whole pages under names of its own"
HOSTS = "other hosts are not asked for pages"
WEIGHTS = "SGLang empties its caches by itself"
MEANINGLESS = {
    "mode": STEPS,
    "wait_for_full_prefix": STEPS,
    "wait_for_full_prefix_seconds": STEPS,
    "transfer_backend": GPU,
    "cuda_ctas": GPU,
    "cuda_ring_size": GPU,
    "save_rate_max": GPU,
    "direct_save_min": GPU,
    "layerwise": GPU,
    "pd_tail_save": PAGES,
    "pd_tail_load": PAGES,
    "keep_on_sleep": WEIGHTS,
    "peers": HOSTS,
    "peer_listen": HOSTS,
    "directory": HOSTS,
    "peer_token_file": HOSTS,
    "peer_tls_cert": HOSTS,
    "peer_tls_key": HOSTS,
    "peer_tls_ca": HOSTS,
    "nics": HOSTS,
    "qps_per_peer": HOSTS,
    "tp_shard_endpoints": HOSTS,
}
"""Options of vLLM's connector that are refused here, and why there is no use for them."""


def parse_options(extra: Mapping[str, Any] | None, environ: Mapping[str, str]) -> ConnectorConfig:
    """The configuration of ``extra`` (SGLang's extra config of the backend) and ``environ``.

    Raises ``InvalidArgument`` for an unknown ``pegaflow.`` option, one that has no meaning with SGLang, or a wrong
    value. Environment variables for other uses of PegaFlow are left alone.
    """
    ours = {key: value for key, value in (extra or {}).items() if key.startswith(PREFIX)}
    for key in ours:
        reason = MEANINGLESS.get(key.removeprefix(PREFIX))
        if reason:
            raise InvalidArgument(f"{key} has no meaning with SGLang ({reason}): remove it.")
    known = {f"PEGAFLOW_{name.upper()}" for name in (*NAMES, "instance_id")}
    config = parse_config(ours, {name: value for name, value in environ.items() if name in known})
    for key in ours:
        if key.removeprefix(PREFIX) not in NAMES:
            raise InvalidArgument(f"{key} has no meaning with SGLang: remove it.")
    return config
