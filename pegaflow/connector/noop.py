"""A connector that does nothing: what vLLM pays for having one at all, as a baseline for measurements."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as kv_base

from pegaflow.connector import compat
from pegaflow.connector.metadata import StepPlan


class NoopKVConnector(kv_base.KVConnectorBase_V1, kv_base.SupportsHMA):
    """Answers every question with nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        compat.register_wire_types()

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is ever handed over."""
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing is cached."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing to fill."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """An empty plan; vLLM wants an object."""
        return StepPlan()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once."""
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once."""
        return False, None

    def reset_cache(self) -> bool:
        """There is nothing to reset, and that always succeeds."""
        return True
